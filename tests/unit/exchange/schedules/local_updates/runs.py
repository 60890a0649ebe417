"""What one process would do for ranks that train by blocks: the reference of the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.unit.models import batch, local_grads, mlp, set_grads, values
from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.exchange.optimizer import MultiNodeOptimizer
from torchmn.exchange.schedules import LocalUpdateSchedule

MakeInner = Callable[[nn.Module], torch.optim.Optimizer]
Move = Callable[[list[Tensor], list[Tensor], float], list[Tensor]]
"""(anchors, mean pseudo_gradients, samples) -> new anchors"""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def average(anchors: list[Tensor], means: list[Tensor], num_samples: float) -> list[Tensor]:
    return [a - d for a, d in zip(anchors, means, strict=True)]


def set_values(model: nn.Module, new: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), new, strict=True):
            parameter.copy_(value)


class Worker:
    """One rank of the simulation."""

    def __init__(self, rank: int, make_inner: MakeInner) -> None:
        self.rank = rank
        self.model = mlp()
        self.inner = make_inner(self.model)
        self.num_samples = 0
        self.step = 0

    def train(self, size: int) -> None:
        x = batch(self.rank, self.step, size)
        set_grads(self.model, local_grads(self.model, x))
        self.inner.step()
        self.num_samples += size
        self.step += 1


def simulate(
    num_ranks: int,
    blocks: Sequence[Sequence[Sequence[int]]],
    move: Move,
    make_inner: MakeInner = sgd,
    after: Callable[[Worker], None] = lambda worker: None,
) -> list[list[Tensor]]:
    """The anchors after each block; ``blocks[b][rank]`` are the sizes of its batches."""
    workers = [Worker(rank, make_inner) for rank in range(num_ranks)]
    anchors = values(workers[0].model)
    history = []
    for block in blocks:
        for worker, sizes in zip(workers, block, strict=True):
            for size in sizes:
                worker.train(size)
        total = sum(worker.num_samples for worker in workers)
        means = [
            sum(
                worker.num_samples * (anchor - values(worker.model)[i])
                for worker in workers
                if worker.num_samples
            )
            / total
            for i, anchor in enumerate(anchors)
        ]
        anchors = move(anchors, means, total)
        for worker in workers:
            set_values(worker.model, anchors)
            worker.num_samples = 0
            after(worker)
        history.append([a.clone() for a in anchors])
    return history


def wrap(
    comm: Communicator,
    schedule: LocalUpdateSchedule,
    make_inner: MakeInner = sgd,
    **options: object,
) -> tuple[nn.Module, MultiNodeOptimizer]:
    model = mlp()
    inner = make_inner(model)
    return model, create_multi_node_optimizer(inner, comm, model, schedule=schedule, **options)
