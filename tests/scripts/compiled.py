"""Compiled models."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from .models import mlp
from .registry import script
from .worker import Worker


@script("`torch.compile(model)` before wrapping", is_slow=True)
def compiled_before_wrapping(worker: Worker) -> nn.Module:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), compiled)
    for x, y in worker.batches():
        optimizer.zero_grad()
        mse_loss(compiled(x), y).backward()
        optimizer.step()
    return model


@script("`torch.compile(model)` after wrapping", is_slow=True)
def compiled_after_wrapping(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    compiled = torch.compile(model, backend="aot_eager")
    for x, y in worker.batches():
        optimizer.zero_grad()
        mse_loss(compiled(x), y).backward()
        optimizer.step()
    return model


@script('`torch.compile(model)` after wrapping, `weight="samples"`', is_slow=True)
def compiled_weighted_by_samples(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model, weight="samples")
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for x, y in worker.uneven_batches():
        optimizer.zero_grad()
        mse_loss(compiled(x), y).backward()
        optimizer.step()
    return model


@script("`model.compile()` in place", is_slow=True)
def compiled_in_place(worker: Worker) -> nn.Module:
    model = mlp()
    model.compile(backend="aot_eager")
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for x, y in worker.batches():
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def _whole_step(worker: Worker, weight: str, batches: Iterable[tuple[Tensor, Tensor]]) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model, weight=weight)

    @torch.compile(backend="aot_eager", dynamic=True)
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for x, y in batches:
        step(x, y)
    return model


@script("`torch.compile` of a function with forward, backward and `step()`", is_slow=True)
def compiled_steps(worker: Worker) -> nn.Module:
    return _whole_step(worker, "rank", worker.batches())


@script('`torch.compile` of a function with a whole step, `weight="samples"`', is_slow=True)
def compiled_steps_weighted_by_samples(worker: Worker) -> nn.Module:
    return _whole_step(worker, "samples", worker.uneven_batches())


@script("Clipping, a recomputed layer and `AveragedModel` in a compiled step", is_slow=True)
def compiled_steps_with_all_that(worker: Worker) -> list[nn.Module]:
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)

    @torch.compile(backend="aot_eager")
    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(checkpoint(model, x, use_reentrant=False), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for x, y in worker.batches():
        step(x, y)
        average.update_parameters(model)
    return [model, average]


@script("Two optimizers in a compiled step", is_slow=True)
def compiled_steps_of_two_optimizers(worker: Worker) -> list[nn.Module]:
    models = mlp(), mlp(seed=9)
    optimizers = [worker.optimizer(torch.optim.SGD(m.parameters(), 0.1), m) for m in models]

    @torch.compile(backend="aot_eager")
    def step(x: Tensor, y: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        (mse_loss(models[0](x), y) + mse_loss(models[1](x), y)).backward()
        for optimizer in optimizers:
            optimizer.step()

    for x, y in worker.batches():
        step(x, y)
    return [*models]
