"""Compiled models."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from .models import mlp, mlp_and_sgd, steps, take_step, train
from .registry import script
from .worker import Worker


@script("`torch.compile(model)` after wrapping", is_slow=True)
def compiled_after_wrapping(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, optimizer, worker.batches())
    return model


def _whole_step(worker: Worker, weight: str, batches: Iterable[tuple[Tensor, Tensor]]) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, weight=weight)

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


class Network(nn.Module):
    """A class of the user's, whose hooks torch.compile leaves outside of what it compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


Call = Callable[[Tensor], Tensor]


def compiled_of(function: Call) -> Call:
    return torch.compile(function, backend="aot_eager")


def _train(worker: Worker, model: nn.Module, forward: Call) -> nn.Module:
    """With weights that must be counted: the parts of ranks differ, in each step otherwise."""
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = worker.optimizer(inner, model, weight="samples")
    train(forward, optimizer, worker.uneven_batches())
    worker.close(optimizer)
    return model


def _run_before(model: nn.Module, forward: Call, sizes: Sequence[int] = (3, 5, 8)) -> None:
    """As a trial of shapes does, with gradients that are thrown away."""
    for size in sizes:
        forward(torch.ones(size, 5, dtype=torch.float64)).sum().backward()
    model.zero_grad()


@script("Compiled and run before wrapping", is_slow=True)
def compiled_and_run_before_wrapping(worker: Worker) -> list[nn.Module]:
    models: list[nn.Module] = []
    for model, sizes in ((mlp(), [3, 5, 8]), (Network(), [3, 5, 8]), (mlp(), [3])):
        compiled = compiled_of(model)
        _run_before(model, compiled, sizes)  # of one size only: code for this size, of one rank
        models.append(_train(worker, model, compiled))
    return models


@script("A compiled function of the model, run before wrapping", is_slow=True)
def compiled_function_run_before_wrapping(worker: Worker) -> list[nn.Module]:
    models: list[nn.Module] = []
    for model in (mlp(), Network()):
        forward = compiled_of(lambda x, model=model: model(x) * 1)
        _run_before(model, forward)
        models.append(_train(worker, model, forward))
    return models


@script("Another model of the same layers was compiled and trained without torchmn", is_slow=True)
def compiled_after_another_model(worker: Worker) -> list[nn.Module]:
    models: list[nn.Module] = []
    for make in (mlp, Network):
        other = make()
        _run_before(other, compiled_of(other))
        model = make()
        models.append(_train(worker, model, compiled_of(model)))
    return models


@script("`model.compile()` or `model.forward = torch.compile(model.forward)`", is_slow=True)
def compiled_forward(worker: Worker) -> list[nn.Module]:
    models: list[nn.Module] = []
    for model in (mlp(), Network()):
        model.forward = compiled_of(model.forward)  # type: ignore[method-assign]
        _run_before(model, model)
        models.append(_train(worker, model, model))
    for model in (mlp(), Network()):
        model.compile(backend="aot_eager")
        _run_before(model, model)
        models.append(_train(worker, model, model))
    return models


@script("A model that is compiled twice; both are called", is_slow=True)
def compiled_twice(worker: Worker) -> nn.Module:
    model = mlp()
    first, second = compiled_of(model), compiled_of(model)
    _run_before(model, first)
    calls = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (first if calls % 2 else second)(x)

    return _train(worker, model, forward)


@script("A second optimizer for a compiled model, after the first was closed", is_slow=True)
def compiled_and_wrapped_again(worker: Worker) -> nn.Module:
    model = mlp()
    compiled = compiled_of(model)
    for _ in range(2):
        _train(worker, model, compiled)
    return model


@script("Copies and evaluations of a compiled model", is_slow=True)
def compiled_with_copies(worker: Worker) -> list[nn.Module]:
    model = mlp()
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    compiled = compiled_of(model)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = worker.optimizer(inner, model, weight="samples")
    averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    of_average = compiled_of(averages[1].module)
    for x, y in worker.uneven_batches():
        take_step(compiled, optimizer, x, y)
        for average in averages:
            average.update_parameters(model)
        with torch.no_grad():  # in training mode, and of the average
            worker.log("norm", sum(p.sum() for p in model.parameters()))
            compiled(torch.ones(4, 5, dtype=torch.float64))
            worker.log("average", of_average(torch.ones(4, 5, dtype=torch.float64)).sum())
        model.eval()
        compiled(torch.ones(4, 5, dtype=torch.float64))
        model.train()
    return [model, *averages]


@script('Accumulation of a compiled model, `weight="samples"`', is_slow=True)
def compiled_with_accumulation(worker: Worker) -> nn.Module:
    model = mlp()
    compiled = compiled_of(model)
    _run_before(model, compiled)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = worker.optimizer(inner, model, weight="samples")
    for x, y in steps(optimizer, worker.uneven_batches()):
        with worker.no_sync(optimizer):
            (mse_loss(compiled(x[:1]), y[:1]) / len(x)).backward()
        (mse_loss(compiled(x[1:]), y[1:]) * (1 - 1 / len(x))).backward()
    return model
