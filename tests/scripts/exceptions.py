"""Exceptions that the script catches."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from .models import mlp_and_sgd, steps
from .registry import refused, script
from .worker import Worker


class _OutOfMemory(torch.autograd.Function):
    """Raises in backward as an allocator does."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory, raised by the script")


@script("Out of memory in `backward()` on all ranks, caught, and a smaller batch tried")
def out_of_memory_in_backward(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for step, (x, y) in enumerate(steps(optimizer, worker.batches(10))):
        try:
            hidden = model[:2](x)
            if step in (2, 6):
                hidden = _OutOfMemory.apply(hidden)
            mse_loss(model[2:](hidden), y).backward()
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            mse_loss(model(x[::2]), y[::2]).backward()
    return model


@script(
    "Out of memory in `backward()` on one rank, caught, and the batch tried again",
    **refused(
        "raised an exception in its backward pass",
        "handle the exception on all ranks: all get the same error at once",
    ),
)
def out_of_memory_on_one_rank(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for step, (x, y) in enumerate(steps(optimizer, worker.batches(10))):
        try:
            hidden = model[:2](x)
            if step == 2 and worker.rank == 1:
                hidden = _OutOfMemory.apply(hidden)
            mse_loss(model[2:](hidden), y).backward()
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
    return model


@script("Ctrl-C between `backward()` and `step()`, caught, and the loop run again")
def interrupted_before_step(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for interrupted_at in (5, None):
        try:
            for step, (x, y) in enumerate(steps(optimizer, worker.batches())):
                mse_loss(model(x), y).backward()
                if step == interrupted_at:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            worker.log("interrupted at", interrupted_at)
    return model


@script("A loss that is not finite is found by the script, and the batch is left out")
def batch_left_out(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for step, (x, y) in enumerate(worker.batches(10)):
        loss = mse_loss(model(x), y) * (float("nan") if step == 4 else 1.0)
        if not torch.isfinite(torch.tensor(worker.mean(loss))):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@script("A gradient that is not finite, found by its norm: the step is left out")
def step_left_out_by_norm(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for step, (x, y) in enumerate(worker.batches(10)):
        optimizer.zero_grad()
        (mse_loss(model(x), y) * (float("inf") if step == 4 else 1.0)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
    return model
