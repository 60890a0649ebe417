"""A small training whose state differs from rank to rank: what the tests save and resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import torchmn
from tests.unit.models import batch, fill, loss_of
from torchmn.checkpoint import MultiNodeCheckpointer
from torchmn.cluster import Topology
from torchmn.comm.codecs import ErrorFeedback, Quantized
from torchmn.testing import run_ranks

Result = TypeVar("Result")


class Training:
    """A model, a multi-node Adam with 1 bit (residuals of each rank's own), and a scheduler."""

    def __init__(self, comm: torchmn.Communicator) -> None:
        self.comm = comm
        # Large enough for the codec: small parameters travel as they are.
        self.model = fill(nn.Sequential(nn.Linear(5, 600), nn.Tanh(), nn.Linear(600, 3)))
        self.inner = torch.optim.Adam(self.model.parameters(), 0.01)
        self.optimizer = torchmn.create_multi_node_optimizer(
            self.inner, comm, self.model, codec=ErrorFeedback(Quantized(bits=1))
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.inner, 2)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, batch(self.comm.rank, number, dtype=torch.float32)).backward()
        self.optimizer.step()
        self.scheduler.step()

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


class Holder:
    """Has any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def checkpointer_of(comm: torchmn.Communicator, path: Path, **options: Any) -> Any:
    return torchmn.create_multi_node_checkpointer(comm, path, "a run", **options)


def saved(
    comm: torchmn.Communicator, path: Path, step: int, state: dict[str, Any], **options: Any
) -> Any:
    """A checkpointer that has saved this state."""
    checkpointer = checkpointer_of(comm, path, **options)
    checkpointer.save(step, state)
    checkpointer.finish()
    return checkpointer


def with_warnings(comm: torchmn.Communicator, path: Path, **options: Any) -> tuple[Any, list[str]]:
    """A checkpointer, and what it warns of."""
    warned: list[str] = []
    checkpointer = checkpointer_of(comm, path, **options)
    checkpointer._warn = warned.append
    return checkpointer, warned


def train(
    path: Path,
    num_ranks: int,
    num_steps: int,
    *,
    between: Callable[[MultiNodeCheckpointer, int], None] = lambda checkpointer, step: None,
    **options: Any,
) -> list[tuple[int, list[Tensor]]]:
    """Resume, train up to ``num_steps``, save after every step: (first step, parameters)."""

    def rank_main(comm: torchmn.Communicator) -> tuple[int, list[Tensor]]:
        training = Training(comm)
        checkpointer = checkpointer_of(comm, path, **options)
        start = checkpointer.resume(training.state)
        for step in range(start, num_steps):
            training.step(step)
            checkpointer.save(step + 1, training.state)
            between(checkpointer, step + 1)
        checkpointer.finish()
        return start, training.parameters()

    return run_ranks(rank_main, num_ranks, topology=Topology.blocks([1] * num_ranks))


def on_ranks(function: Callable[[torchmn.Communicator], Result], num_ranks: int) -> list[Result]:
    return run_ranks(function, num_ranks)


def names(path: Path) -> list[str]:
    """What is in the folder of the run, hidden ones too."""
    return sorted(entry.name for entry in (path / "a run").iterdir())


def assert_same(
    ours: list[tuple[int, list[Tensor]]], theirs: list[tuple[int, list[Tensor]]]
) -> None:
    for (_, mine), (_, yours) in zip(ours, theirs, strict=True):
        for a, b in zip(mine, yours, strict=True):
            assert torch.equal(a, b)
