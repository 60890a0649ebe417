"""Ordinary training loops with a model on two ranks, compared with one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import torchmn.nn.functions as F
from torchmn.comm import Communicator
from torchmn.testing import run_ranks

Outcome = tuple[list[Tensor], list[float]]
"""The parameters of a rank, and what it logged."""


class Halves:
    """A model of two halves: both on one process, or one on each of two ranks."""

    def __init__(self, comm: Communicator | None) -> None:
        self.comm = comm
        generator = torch.Generator().manual_seed(3)
        halves = [nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 2)]
        for parameter in nn.ModuleList(halves).parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.modules = nn.ModuleList(halves if comm is None else [halves[comm.rank]]).double()
        self.run = [module.forward for module in self.modules]
        self.logged: list[float] = []

    @property
    def has_loss(self) -> bool:
        return self.comm is None or self.comm.rank == 1

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss; a delegate on the rank that has none."""
        if self.comm is None:
            return mse_loss(self.run[1](self.run[0](x)).double(), y)
        if self.comm.rank == 0:
            return F.send(self.run[0](x), self.comm, 1)
        return mse_loss(self.run[0](F.recv(self.comm, 0)).double(), y)

    def log(self, value: Tensor) -> None:
        if self.has_loss:
            self.logged.append(float(value.detach()))

    def batches(self, sizes: tuple[int, ...] = (5, 5, 5)) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        for size in sizes:
            x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
            yield x, x[:, :2].sin()

    def sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.modules.parameters(), 0.2, momentum=0.9)


def plain(halves: Halves) -> nn.Module:
    optimizer = halves.sgd()
    for x, y in halves.batches((5, 1, 8)):
        optimizer.zero_grad()
        loss = halves.loss(x, y)
        loss.backward()
        optimizer.step()
        halves.log(loss)
    return halves.modules


def scaled_loss(halves: Halves) -> nn.Module:
    halves.modules.float()
    optimizer = halves.sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x, y in halves.batches():
        optimizer.zero_grad()
        loss = halves.loss(x.float(), y)
        if halves.has_loss:
            loss = scaler.scale(loss)
        else:
            scaler.scale(torch.zeros(()))
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
    return halves.modules.double()


def several_losses_at_once(halves: Halves) -> nn.Module:
    """Micro-batches: all forward passes, then one backward pass."""
    optimizer = halves.sgd()
    for x, y in halves.batches((6, 6)):
        optimizer.zero_grad()
        losses = [halves.loss(*part) for part in zip(x.chunk(3), y.chunk(3), strict=True)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return halves.modules


def frozen_first_half(halves: Halves) -> nn.Module:
    if halves.comm is None or halves.comm.rank == 0:
        halves.modules[0].requires_grad_(False)
    optimizer = halves.sgd()
    for x, y in halves.batches():
        optimizer.zero_grad()
        loss = halves.loss(x, y)
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
    return halves.modules


SCRIPTS = (plain, scaled_loss, several_losses_at_once, frozen_first_half)


def rank_main(comm: Communicator, script: Callable[[Halves], nn.Module]) -> Outcome:
    halves = Halves(comm)
    module = script(halves)
    return [p.detach() for p in module.parameters()], halves.logged


def check(script: Callable[[Halves], nn.Module], outcomes: list[Outcome]) -> None:
    one = Halves(None)
    whole = copy.deepcopy(script(one))
    (first, _), (second, logged) = outcomes
    expected = [p.detach() for p in whole.parameters()]
    torch.testing.assert_close([*first, *second], expected, rtol=1e-12, atol=1e-12)
    assert logged == pytest.approx(one.logged, rel=1e-12)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_is_as_on_one_process(script: Callable[[Halves], nn.Module]) -> None:
    check(script, run_ranks(lambda comm: rank_main(comm, script), 2))


def compiled(halves: Halves) -> nn.Module:
    halves.run = [torch.compile(module, backend="aot_eager") for module in halves.modules]
    return plain(halves)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_parts() -> None:
    """The ranks compile one after the other, as their data depend on each other."""
    check(compiled, run_ranks(lambda comm: rank_main(comm, compiled), 2))
