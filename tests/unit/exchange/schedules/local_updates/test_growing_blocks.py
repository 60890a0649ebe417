"""Blocks that grow as the learning rate falls."""

from __future__ import annotations

import pytest

from tests.unit.exchange.schedules.local_updates.runs import (
    momentum,
    train,
    wrap,
)
from torchmn.cluster import Topology
from torchmn.errors import UsageError
from torchmn.exchange.replicas import different_tensors
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, GrowingBlocks, PeriodicAverage, Warmup
from torchmn.exchange.schedules.local_updates.growing_blocks import BlockLength
from torchmn.testing import run_ranks


def test_the_quadratic_rule() -> None:
    """The paper's: H = max(H_base, (alpha / eta)^2) steps, of 64 samples here."""
    h_base, alpha = 4, 0.0175
    size = GrowingBlocks(block_size=64 * h_base, rate=alpha / h_base**0.5)
    for eta in (0.008, 0.004, 0.002, 0.0011):
        assert size.at(eta) == pytest.approx(64 * max(h_base, (alpha / eta) ** 2))


def test_other_powers_and_the_largest_size() -> None:
    size = GrowingBlocks(block_size=100, rate=0.1, power=1, max_growth=8)
    assert [size.at(rate) for rate in (0.2, 0.1, 0.05, 0.01, 0.0)] == [100, 100, 200, 800, 800]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0 of GrowingBlocks must be above 0"),
        ({"rate": float("inf")}, "rate=inf of GrowingBlocks must be above 0 and finite"),
        ({"power": -1}, "power=-1"),
        ({"max_growth": 0.5}, "max_growth=0.5 must be at least 1"),
        ({"max_growth": float("inf")}, "max_growth=inf must be at least 1, and finite"),
    ],
)
def test_values_that_make_no_sense(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GrowingBlocks(**{"block_size": 100, "rate": 0.1, **options})


def test_blocks_do_not_grow_while_the_rate_rises() -> None:
    length = BlockLength(GrowingBlocks(block_size=100, rate=0.1))
    sizes = []
    for rate in (0.01, 0.01, 0.05, 0.2, 0.2, 0.1, 0.05, 0.2, 0.025):
        length.block_ended(rate)
        sizes.append(length.current)
    assert sizes == [100, 100, 100, 100, 100, 100, 400, 100, 1600]


RULE = GrowingBlocks(block_size=24, rate=0.1, power=1)
"""At 0.1, 0.05 and 0.025 blocks of 24, 48 and 96 samples."""


@pytest.mark.parametrize("make", [PeriodicAverage, BlockMomentum, DiLoCo])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_steps": 2}, {"overlap_steps": 1, "num_fragments": 3}, {"intra_node": True}],
    ids=str,
)
def test_ranks_whose_rates_and_batches_differ_have_equal_blocks(make: type, options: dict) -> None:
    """Rank 2 makes fewer steps, and lowers its rate at each: the mean of the rates decides."""
    if options.get("intra_node"):
        options = {"intra_node": "every_step"}

    def rank_main(comm):
        schedule = make(GrowingBlocks(block_size=36, rate=0.08), **options)
        model, optimizer = wrap(comm, schedule, momentum)
        num_samples = 3 if comm.rank < 2 else 6
        sizes = []
        note = schedule.outer_step
        schedule.outer_step = lambda *args: (sizes.append(schedule.current_block_size), note(*args))
        for step in range(48 // num_samples):
            train(model, optimizer, comm.rank, step, num_samples)
            for group in optimizer.param_groups:
                group["lr"] *= 0.93
        optimizer.flush()
        assert different_tensors(comm, [model]) == []
        assert len(set(map(tuple, comm.allgather_obj(sizes)))) == 1
        assert max(sizes) > 36
        optimizer.close()

    run_ranks(rank_main, 3, name="hierarchical", topology=Topology.blocks([2, 1]))


def test_after_a_warm_up_and_with_several_groups() -> None:
    """The highest rate of the groups counts."""

    def rank_main(comm):
        schedule = PeriodicAverage(RULE)
        model, optimizer = wrap(comm, Warmup(16, schedule))
        optimizer.param_groups[0]["lr"] = 0.1
        low = {**optimizer.param_groups[0], "params": optimizer.param_groups[0]["params"][2:]}
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:2]
        optimizer.param_groups.append({**low, "lr": 0.001})
        for step in range(8):
            assert schedule.current_block_size == 24
            train(model, optimizer, comm.rank, step)
            if step == 6:
                optimizer.param_groups[0]["lr"] = 0.05
        train(model, optimizer, comm.rank, 8)
        train(model, optimizer, comm.rank, 9)
        train(model, optimizer, comm.rank, 10)
        assert schedule.current_block_size == 48

    run_ranks(rank_main, 2)
