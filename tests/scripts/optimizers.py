"""Optimizers."""

import copy
import gc
import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from .models import fit, mlp, mlp_and_sgd, take_step, train
from .registry import refused, script
from .worker import Worker, whole_batch


def _train(worker: Worker, make: Callable[[Iterable[Tensor]], Optimizer]) -> nn.Module:
    model = mlp()
    return fit(worker, model, make(model.parameters()))


@script("`SGD` with Nesterov momentum, weight decay, and foreach")
def sgd(worker: Worker) -> nn.Module:
    return _train(
        worker,
        lambda p: torch.optim.SGD(
            p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True
        ),
    )


@script("`Adam` with AMSGrad")
def adam(worker: Worker) -> nn.Module:
    return _train(worker, lambda p: torch.optim.Adam(p, 0.01, amsgrad=True))


@script("`AdamW`, fused")
def adamw_fused(worker: Worker) -> nn.Module:
    return _train(worker, lambda p: torch.optim.AdamW(p, 0.01, fused=True))


@script("`RMSprop`, centered, with momentum")
def rmsprop(worker: Worker) -> nn.Module:
    return _train(worker, lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5))


@script("`Adagrad`, `Adadelta`, `Adamax`, `NAdam`, `RAdam`, `ASGD`, `Rprop` and `Adafactor`")
def rarer_optimizers(worker: Worker) -> list[nn.Module]:
    return [
        _train(worker, make)
        for make in (
            lambda p: torch.optim.Adagrad(p, 0.1),
            lambda p: torch.optim.Adadelta(p, 1.0),
            lambda p: torch.optim.Adamax(p, 0.01),
            lambda p: torch.optim.NAdam(p, 0.01),
            lambda p: torch.optim.RAdam(p, 0.01),
            lambda p: torch.optim.ASGD(p, 0.05),
            lambda p: torch.optim.Rprop(p, 0.01),
            lambda p: torch.optim.Adafactor(p, 0.05),
        )
    ]


class _GlobalNorm(Optimizer):
    """Divides every gradient by the norm of all of them."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad / norm, alpha=self.defaults["lr"])


@script("An optimizer of the user's own that looks at all gradients at once")
def own_optimizer_of_the_global_norm(worker: Worker) -> nn.Module:
    return _train(worker, lambda p: _GlobalNorm(p, 0.05))


@script("Several parameter groups, options changed through `param_groups`")
def parameter_groups(worker: Worker) -> nn.Module:
    model = mlp()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.2}]
    optimizer = worker.optimizer(torch.optim.SGD(groups, 0.1), model)
    for x, y in worker.batches():
        take_step(model, optimizer, x, y)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            group["weight_decay"] += 0.001
    return model


@script("`add_param_group()` in the middle of training")
def group_added_later(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.SGD(model[4].parameters(), 0.1, momentum=0.9), model)
    for step, (x, y) in enumerate(worker.batches(12)):
        if step == 4:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
        if step == 8:
            optimizer.add_param_group({"params": model[0].parameters()})
        take_step(model, optimizer, x, y)
    return model


@script("A notebook cell that makes the optimizer runs twice before training")
def cell_run_twice(worker: Worker) -> nn.Module:
    model = mlp()
    for _ in range(2):
        optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    train(model, optimizer, worker.batches())
    return model


@script("The first optimizer is deleted and collected, then a second one is made")
def optimizer_deleted(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    train(model, optimizer, worker.batches(5))
    worker.flush(optimizer)
    del optimizer
    gc.collect()
    return fit(worker, model, torch.optim.SGD(model.parameters(), 0.05))


@script("Two optimizers for two parts of a model, both stepped after one `backward()`")
def two_optimizers(worker: Worker) -> nn.Module:
    model = mlp()
    first = worker.optimizer(torch.optim.SGD(model[:2].parameters(), 0.1), model)
    second = worker.optimizer(torch.optim.Adam(model[2:].parameters(), 0.01), model)
    for x, y in worker.batches():
        first.zero_grad()
        second.zero_grad()
        mse_loss(model(x), y).backward()
        first.step()
        second.step()
    return model


@script("Two optimizers stepped in turns: the slow one every third step, gradients accumulate")
def two_optimizers_in_turns(worker: Worker) -> nn.Module:
    model = mlp()
    fast = worker.optimizer(torch.optim.SGD(model[2:].parameters(), 0.1), model)
    slow = worker.optimizer(torch.optim.SGD(model[:2].parameters(), 0.1), model)
    for step, (x, y) in enumerate(worker.batches(12)):
        fast.zero_grad()
        mse_loss(model(x), y).backward()
        fast.step()
        if step % 3 == 2:
            slow.step()
            slow.zero_grad()
    return model


@script(
    "Two optimizers that share a layer, used in turns",
    **refused(
        "only one multi-node optimizer can exchange the gradient of a parameter",
        cure="make one optimizer with several parameter groups",
    ),
)
def two_optimizers_that_share(worker: Worker) -> list[nn.Module]:
    body, heads = mlp(), [mlp(seed=1), mlp(seed=2)]
    for head in heads:
        head[0] = nn.Identity()
    chains = [nn.Sequential(body[:2], head[2:]) for head in heads]
    optimizers = [
        worker.optimizer(
            torch.optim.SGD(itertools.chain(body[:2].parameters(), head[2:].parameters()), 0.1),
            chain,
        )
        for head, chain in zip(heads, chains, strict=True)
    ]
    for step, (x, y) in enumerate(worker.batches(10)):
        optimizer, chain = optimizers[step % 2], chains[step % 2]
        take_step(chain, optimizer, x, y)
    return chains


@script("The optimizer's state is saved and loaded in the middle of training")
def state_saved_and_loaded(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    for step, (x, y) in enumerate(worker.batches(10)):
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        take_step(model, optimizer, x, y)
    return model


@script("The step is left out in every third iteration")
def step_left_out(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for step, (x, y) in enumerate(worker.batches(10)):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        if step % 3 != 2:
            optimizer.step()
    return model


@script("`step()` twice after one `backward()`")
def two_steps_of_one_gradient(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    for x, y in worker.batches():
        take_step(model, optimizer, x, y)
        optimizer.step()
    return model


@script("Trained by the plain optimizer identically on all ranks, then wrapped; its state is kept")
def wrapped_after_some_steps(worker: Worker) -> nn.Module:
    model = mlp()
    adam = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(3):
        x, y = whole_batch(100 + step)
        adam.zero_grad()
        mse_loss(model(x), y).backward()
        adam.step()
    return fit(worker, model, adam)


@script("The state continues in a plain optimizer, after `close()`")
def state_in_a_plain_optimizer(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    train(model, optimizer, worker.batches(6))
    plain = torch.optim.Adam(model.parameters(), 0.5)
    plain.load_state_dict(optimizer.state_dict())
    worker.close(optimizer)
    for step in range(3):
        x, y = whole_batch(100 + step)
        plain.zero_grad()
        mse_loss(model(x), y).backward()
        plain.step()
    return model


@script(
    "`copy.deepcopy(optimizer)`",
    **refused("cannot be copied", cure="copy its `state_dict()`", on_one_rank=True),
)
def optimizer_copied(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for x, y in worker.batches():
        take_step(model, optimizer, x, y)
        copy.deepcopy(optimizer)
    return model
