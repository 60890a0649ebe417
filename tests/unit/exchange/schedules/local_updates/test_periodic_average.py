"""The mean of parameters, weighted by samples."""

from __future__ import annotations

import pytest

from tests.unit.exchange.schedules.local_updates.runs import adam, average, simulate, train, wrap
from tests.unit.models import near, values
from torchmn.exchange.schedules import PeriodicAverage
from torchmn.testing import run_ranks


@pytest.mark.parametrize("sizes", [[3, 3], [1, 4], [2, 5, 1]], ids=str)
def test_the_mean_is_weighted_by_samples(sizes: list[int]) -> None:
    """A block of one step; the mean of parameters themselves, with other inner state per rank."""

    def rank_main(comm):
        model, optimizer = wrap(comm, PeriodicAverage(comm.size), adam)
        for step in range(3):
            train(model, optimizer, comm.rank, step, sizes[comm.rank])
        return values(model)

    blocks = [[[size] for size in sizes]] * 3
    expected = simulate(len(sizes), blocks, average, adam)[-1]
    for result in run_ranks(rank_main, len(sizes)):
        assert near(result, expected)
