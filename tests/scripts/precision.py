"""Precision."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from .models import built, fit, mlp, mlp_and_sgd, steps
from .registry import script
from .worker import Worker

BF16 = 8 * torch.finfo(torch.bfloat16).eps
IN_BF16 = "sums in bfloat16 are rounded in another order"


@script("`GradScaler`, gradients unscaled and clipped, a step left out at an overflow")
def grad_scaler(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step, (x, y) in enumerate(worker.batches(10)):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        if step == 5:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        worker.log("scale", scaler.get_scale())
    return model


@script("`torch.autocast` to bfloat16", tolerance=BF16, why_tolerance=IN_BF16)
def autocast(worker: Worker) -> nn.Module:
    model = mlp().float()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.5), model)
    for x, y in steps(optimizer, worker.batches()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(x.float())
        mse_loss(outputs.float(), y.float()).backward()
    return model


@script("`backward()` inside `torch.autocast`", tolerance=BF16, why_tolerance=IN_BF16)
def backward_inside_autocast(worker: Worker) -> nn.Module:
    model = mlp().float()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.5), model)
    for x, y in steps(optimizer, worker.batches()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mse_loss(model(x.float()).float(), y.float()).backward()
    return model


@script("bfloat16 parameters", tolerance=BF16, why_tolerance=IN_BF16)
def bfloat16_parameters(worker: Worker) -> nn.Module:
    model = mlp().bfloat16()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.5), model)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x.bfloat16()).float(), y.float()).backward()
    return model


@script(
    "Parameters of several types in one model: float64, float32, bfloat16",
    tolerance=BF16,
    why_tolerance=IN_BF16,
)
def mixed_types(worker: Worker) -> nn.Module:
    model = mlp()
    model[2].float()
    model[4].bfloat16()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.3), model)
    for x, y in steps(optimizer, worker.batches()):
        hidden = model[1](model[0](x)).float()
        outputs = model[4](model[3](model[2](hidden)).bfloat16())
        mse_loss(outputs.double(), y).backward()
    return model


class _Spectrum(nn.Module):
    """Complex, empty and scalar parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.filter.dtype) @ self.filter).abs() * self.gain + self.empty.sum()


@script("Complex, empty and scalar parameters")
def complex_and_empty(worker: Worker) -> nn.Module:
    model = built(_Spectrum)
    return fit(worker, model, torch.optim.Adam(model.parameters(), 0.05))
