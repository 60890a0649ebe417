"""Buffers that forward changes."""

import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .models import built, fit, mlp, steps
from .registry import script
from .worker import Worker, whole_batch

NUM_STEPS = 32  # in which the checksums of all parameters and buffers are compared


class _Codebook(nn.Module):
    """As of a VQ-VAE: each row is the moving average of the samples nearest to it."""

    rows: Tensor

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self.register_buffer("rows", torch.linspace(-1, 1, 12).view(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.rows).argmin(1)
        if self.training:
            counts = torch.bincount(nearest, minlength=4).unsqueeze(1)
            sums = torch.zeros_like(self.rows).index_add_(0, nearest, x.detach())
            counts, sums = self._worker.sum_over_ranks(counts, sums)
            averages = 0.9 * self.rows + 0.1 * sums / counts.clamp(min=1)
            self.rows.copy_(torch.where(counts > 0, averages, self.rows))
        return x + (self.rows[nearest] - x).detach()


def _quantizing(worker: Worker) -> nn.Sequential:
    return built(
        lambda: nn.Sequential(
            nn.Linear(5, 3), nn.Tanh(), _Codebook(worker), nn.Linear(3, 4), nn.Linear(4, 3)
        )
    )


@script(
    "The codebook of a VQ-VAE, sums over ranks in `forward`; clipped, and averaged with buffers"
)
def codebook(worker: Worker) -> list[nn.Module]:
    model = _quantizing(worker)
    average = AveragedModel(model[2:], multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    for x, y in worker.batches(NUM_STEPS):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        worker.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        worker.flush(optimizer)
        average.update_parameters(model[2:])
    return [model, average.module]


@script(
    "The same with two optimizers, its state saved and loaded in the middle, evaluated in turns"
)
def codebook_of_two_optimizers(worker: Worker) -> nn.Module:
    model = _quantizing(worker)
    encoder = worker.optimizer(torch.optim.SGD(model[0].parameters(), 0.1), model[0])
    decoder = worker.optimizer(torch.optim.Adam(model[2:].parameters(), 0.01), model[2:])
    for step, (x, y) in enumerate(worker.batches(NUM_STEPS)):
        encoder.zero_grad()
        decoder.zero_grad()
        mse_loss(model(x), y).backward()
        encoder.step()
        decoder.step()
        if step % 8 == 3:
            worker.flush(encoder)
            worker.flush(decoder)
            with torch.no_grad():
                worker.log("loss", worker.mean(mse_loss(model.eval()(x), y)))
            model.train()
        if step == 15:
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        elif step == 19:
            model.load_state_dict(state)
    return model


@script(
    "Quantization-aware training (`prepare_qat`): calibrated on all ranks alike, then no observers",
    tolerance=4e-6,
    why_tolerance="sums in float32 are rounded in another order",
)
def quantization_aware(worker: Worker) -> nn.Module:
    model = nn.Sequential(quantization.QuantStub(), *mlp(), quantization.DeQuantStub())
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model = quantization.prepare_qat(model.train()).float()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    with torch.no_grad():
        model(
            whole_batch(0)[0].float()
        )  # observers with a range for each channel change their shape
    model.apply(quantization.disable_observer)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x.float()), y.float()).backward()
    return model


class _Bank(nn.Module):
    """Holds what all ranks have seen, in a buffer that grows with every batch."""

    seen: Tensor

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self.register_buffer("seen", torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            new = self._worker.gather_with_gradient(x.detach())
            old = len(self.seen)
            self.seen.resize_(old + len(new), 3)[old:] = new
        return x + 0.1 * torch.softmax(x @ self.seen.T, 1) @ self.seen


@script("A memory bank that grows: a buffer resized in `forward`, by the samples of all ranks")
def growing_bank(worker: Worker) -> nn.Module:
    model = built(lambda: nn.Sequential(nn.Linear(5, 3), _Bank(worker), nn.Linear(3, 3)))
    return fit(worker, model, batches=worker.batches(NUM_STEPS))
