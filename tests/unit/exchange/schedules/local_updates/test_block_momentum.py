"""CNTK's formula, against one process that computes it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.ranks import on_ranks
from tests.unit.exchange.schedules.local_updates.runs import (
    Worker,
    adam,
    momentum,
    sgd,
    simulate,
    wrap,
)
from tests.unit.models import equal, near, train, values
from torchmn.cluster import Topology
from torchmn.errors import UsageError
from torchmn.exchange.schedules import BlockMomentum
from torchmn.testing import run_ranks


class Cntk:
    """`SynchronizeModel` of CNTK's learner, with the samples of all workers for its own."""

    def __init__(
        self, size: int, block_size: float, constant: float | None, nesterov: bool, blr: float
    ) -> None:
        if constant is None:
            constant = -block_size / math.log(1 - 1 / size) if size > 1 else 0.0
        self.size, self.constant, self.nesterov, self.blr = size, constant, nesterov, blr
        self.smoothed: list[Tensor] | None = None

    def __call__(self, anchors: list[Tensor], means: list[Tensor], n: float) -> list[Tensor]:
        bm = math.exp(-n / self.constant) if self.constant else 0.0
        self.smoothed = self.smoothed or [torch.zeros_like(a) for a in anchors]
        after = []
        for i, (anchor, mean) in enumerate(zip(anchors, means, strict=True)):
            total = self.size * mean
            self.smoothed[i] = bm * self.smoothed[i] + (1 - bm) * self.blr * total
            w = anchor - self.smoothed[i]
            after.append(w - bm * self.smoothed[i] if self.nesterov else w)
        return after


def reset(worker: Worker) -> None:
    for state in worker.inner.state.values():
        state["momentum_buffer"].zero_()


@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("blr", [1.0, 0.4])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("constant", [None, 0, 60.0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_equals_cntk(
    size: int, constant: float | None, nesterov: bool, blr: float, resets: bool
) -> None:
    block_size = 8 * size

    def rank_main(comm):
        schedule = BlockMomentum(block_size, constant, nesterov, resets, blr)
        model, optimizer = wrap(comm, schedule, momentum)
        train(model, optimizer, comm.rank, range(8))
        return values(model)

    expected = simulate(
        size,
        [[[4, 4]] * size] * 4,
        Cntk(size, block_size, constant, nesterov, blr),
        momentum,
        reset if resets else lambda worker: None,
    )[-1]
    for result in run_ranks(rank_main, size):
        assert near(result, expected, 1e-11)


def test_the_exponent_is_of_the_samples_of_all() -> None:
    """Uneven blocks: every rank has the same momentum, and replicas stay equal."""
    sizes = [[4, 4], [7, 7]]

    def rank_main(comm):
        model, optimizer = wrap(comm, BlockMomentum(16), sgd)
        train(model, optimizer, comm.rank, range(6), sizes[comm.rank][0])
        return values(model)

    expected = simulate(2, [sizes] * 3, Cntk(2, 16, None, True, 1.0))[-1]
    results = run_ranks(rank_main, 2)
    assert equal(*results)
    assert near(results[0], expected)


@on_ranks(2)
def test_an_empty_block_is_skipped(comm) -> None:
    """CNTK's exponent of no samples was a momentum of one: a step by twice the last."""
    model, optimizer = wrap(comm, BlockMomentum(8))
    train(model, optimizer, comm.rank, range(4))
    before, state = values(model), optimizer.schedule.state_dict()["outer"]
    for _ in range(3):
        optimizer.flush()
    assert equal(values(model), before)
    after = optimizer.schedule.state_dict()["outer"]
    assert equal(list(after.values()), list(state.values()))


@pytest.mark.parametrize(("inner", "name"), [(momentum, "momentum_buffer"), (adam, "exp_avg")])
@pytest.mark.parametrize("resets", [True, False])
@on_ranks(2)
def test_first_moments_are_reset(comm, inner, name: str, resets: bool) -> None:
    schedule = BlockMomentum(8, reset_sgd_momentum_after_aggregation=resets)
    model, optimizer = wrap(comm, schedule, inner)
    train(model, optimizer, comm.rank, [0])
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert bool(state[name].any()) is not resets
        if name == "exp_avg":
            assert state["exp_avg_sq"].any()
            assert state["step"] == 1


@on_ranks(3, topology=Topology.blocks([2, 1]))
def test_a_worker_is_a_node_if_nodes_train_as_one(comm) -> None:
    schedule = BlockMomentum(12, intra_node="every_step")
    _, optimizer = wrap(comm, schedule)
    assert schedule.block_momentum(12) == pytest.approx(1 - 1 / 2)
    optimizer.close()


@pytest.mark.parametrize("constant", [-1, float("nan"), float("inf")])
def test_a_time_constant_that_makes_no_sense(constant: float) -> None:
    with pytest.raises(UsageError, match="must be a number of samples, at least 0"):
        BlockMomentum(8, constant)
