"""Layers."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from .models import built, convolutions, fit, mlp, mlp_and_sgd, steps, take_step, train
from .registry import refused, script
from .worker import Worker


@script("`weight_norm`")
def weight_normalised(worker: Worker) -> nn.Module:
    model = mlp()
    weight_norm(model[0])
    weight_norm(model[4])
    return fit(worker, model)


@script("`spectral_norm`")
def spectrally_normalised(worker: Worker) -> nn.Module:
    model = mlp()
    built(lambda: spectral_norm(model[2]))
    return fit(worker, model)


@script("Dropout by a mask that the script makes for the whole batch")
def dropout_by_mask(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    random = torch.Generator().manual_seed(3)
    for x, y in steps(optimizer, worker.batches()):
        mask = worker.part(torch.bernoulli(torch.full((8, 8), 0.5), generator=random)) * 2
        hidden = model[:2](x) * mask
        mse_loss(model[2:](hidden), y).backward()
    return model


def _normalised() -> nn.Sequential:
    return built(
        lambda: nn.Sequential(
            nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)
        )
    )


@script("Fine-tuning with batch normalization and dropout in `eval()`")
def normalisation_in_evaluation(worker: Worker) -> nn.Module:
    model = _normalised()
    with torch.no_grad():
        model[1].running_mean.fill_(0.2)
        model[1].running_var.fill_(0.7)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    model.eval()
    train(model, optimizer, worker.batches())
    return model


def _each_part_normalised_alone(worker: Worker) -> list[Tensor]:
    """One process that normalises each half of the batch by itself."""
    model = _normalised()
    model[3] = nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in steps(optimizer, worker.batches()):
        parts = zip(x.chunk(2), y.chunk(2), strict=True)
        (sum(mse_loss(model(a), b) for a, b in parts) / 2).backward()
    return list(model.parameters())


@script(
    "Batch normalization in `train()`",
    own_definition="each rank normalizes by its own part of the batch",
    reference=_each_part_normalised_alone,
)
def normalisation_in_training(worker: Worker) -> list[Tensor]:
    model = _normalised()
    model[3] = nn.Identity()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for x, y in steps(optimizer, worker.batches()):
        if worker.size == 1:  # what two ranks do is what is compared
            parts = zip(x.chunk(2), y.chunk(2), strict=True)
            (sum(mse_loss(model(a), b) for a, b in parts) / 2).backward()
        else:
            mse_loss(model(x), y).backward()
    worker.flush(optimizer)
    return list(model.parameters())


@script("`train()` and `eval()` in turns, the loss of evaluation logged")
def training_and_evaluation(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    held_out = list(worker.batches(10))[8:]
    for x, y in worker.batches():
        model.train()
        take_step(model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            losses = [mse_loss(model(a), b) for a, b in held_out]
        worker.log("loss of evaluation", worker.mean(torch.stack(losses).mean()))
    return model


@script("Convolutions")
def convolutional(worker: Worker) -> nn.Module:
    model = convolutions()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for x, y in steps(optimizer, worker.batches()):
        images = torch.einsum("bi,bj->bij", x, x)[:, None, :, :].expand(-1, 3, -1, -1)
        images = nn.functional.pad(images, (0, 1, 0, 1))
        mse_loss(model(images), y).backward()
    return model


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.recurrent = nn.LSTM(6, 7, batch_first=True)
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)
        self.out = nn.Linear(7, 11)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.words(words))
        hidden, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return self.out(hidden)


@script("Embedding, LSTM and attention, cross entropy over words, clipped by norm")
def language_model(worker: Worker) -> nn.Module:
    model = built(_Translator)
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    for x, _ in steps(optimizer, worker.batches()):
        words = (x.abs() * 7).long() % 11
        outputs = model(words[:, :-1])
        nn.functional.cross_entropy(outputs.transpose(1, 2), words[:, 1:]).backward()
        worker.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.25))
    return model


@script("`nn.Embedding(sparse=True)` with `SparseAdam` for it")
def sparse_embedding(worker: Worker) -> list[nn.Module]:
    words = built(lambda: nn.Embedding(11, 5, sparse=True), seed=1)
    model = mlp()
    of_words = worker.optimizer(torch.optim.SparseAdam(words.parameters(), 0.01), words)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for x, y in worker.batches():
        optimizer.zero_grad()
        of_words.zero_grad()
        indices = (x.abs() * 7).long() % 11
        mse_loss(model(words(indices).mean(1)), y).backward()
        optimizer.step()
        of_words.step()
    return [words, model]


@script("`torch.nn.utils.prune` before training and in the middle")
def pruned(worker: Worker) -> nn.Module:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for step, (x, y) in enumerate(worker.batches(10)):
        if step == 5:
            prune.ln_structured(model[2], "weight", amount=0.3, n=2, dim=0)
        take_step(model, optimizer, x, y)
    return model


@script("Lazy layers, wrapped after a first forward pass")
def lazy_layers(worker: Worker) -> nn.Module:
    model = built(lambda: nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3)))
    built(lambda: model(torch.zeros(1, 5)))
    return fit(worker, model)


@script(
    "Lazy layers, wrapped before their first forward pass",
    **refused("not initialized", cure="run one batch through the model first", on_one_rank=True),
)
def lazy_layers_wrapped_too_early(worker: Worker) -> nn.Module:
    model = built(lambda: nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3)))
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for step, (x, y) in enumerate(steps(optimizer, worker.batches())):
        outputs = model(x) if step else built(lambda x=x: model(x))
        mse_loss(outputs, y).backward()
    return model
