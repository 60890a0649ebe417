"""Learning rate schedulers."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer, lr_scheduler

from .models import mlp, mlp_and_sgd, take_step
from .registry import refused, script
from .worker import NUM_STEPS, Worker


def _train(
    worker: Worker, make: Callable[[Optimizer], object], *, by_loss: bool = False
) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    scheduler = make(optimizer)
    for x, y in worker.batches():
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(worker.mean(loss)) if by_loss else scheduler.step()
        worker.log("rate", optimizer.param_groups[0]["lr"])
    return model


@script("`StepLR`, `MultiStepLR`, `ExponentialLR`, `PolynomialLR`, `LambdaLR`, `MultiplicativeLR`")
def rates_by_steps(worker: Worker) -> list[nn.Module]:
    return [
        _train(worker, make)
        for make in (
            lambda o: lr_scheduler.StepLR(o, 2, 0.5),
            lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3),
            lambda o: lr_scheduler.ExponentialLR(o, 0.9),
            lambda o: lr_scheduler.PolynomialLR(o, NUM_STEPS, 2.0),
            lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
            lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.8),
        )
    ]


@script("`CosineAnnealingLR` and its restarts, `LinearLR`, `ConstantLR`, chained and in sequence")
def rates_in_sequence(worker: Worker) -> list[nn.Module]:
    return [
        _train(worker, make)
        for make in (
            lambda o: lr_scheduler.CosineAnnealingLR(o, NUM_STEPS),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)],
                [3],
            ),
            lambda o: lr_scheduler.ChainedScheduler(
                [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
            ),
        )
    ]


@script("`OneCycleLR` and `CyclicLR`, which change the momentum as well")
def rates_in_cycles(worker: Worker) -> list[nn.Module]:
    return [
        _train(worker, make)
        for make in (
            lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=NUM_STEPS + 1),
            lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3),
        )
    ]


@script("`ReduceLROnPlateau` on the mean loss of all ranks")
def rate_on_plateau(worker: Worker) -> nn.Module:
    return _train(
        worker, lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5), by_loss=True
    )


@script("Early stopping on the mean loss of all ranks")
def early_stopping(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.3), model)
    best, patience = float("inf"), 2
    for x, y in worker.batches(30):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        mean = worker.mean(loss)
        worker.log("loss", mean)
        best, patience = (mean, 2) if mean < best else (best, patience - 1)
        if patience == 0:
            break
    return model


@script("A scheduler made of the user's own optimizer before wrapping")
def scheduler_made_before_wrapping(worker: Worker) -> nn.Module:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = lr_scheduler.ExponentialLR(sgd, 0.8)
    optimizer = worker.optimizer(sgd, model)
    for x, y in worker.batches():
        take_step(model, optimizer, x, y)
        scheduler.step()
    return model


@script(
    "`ReduceLROnPlateau` on the loss of each rank's own samples",
    **refused("the learning rates of the ranks differ", cure="`comm.sum_over_ranks(loss_sum, n)`"),
)
def plateau_of_own_loss(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    rates = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for x, y in worker.batches(16):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        rates.step(loss.item())
    return model
