"""Counts of samples that are, or are not, in the proportion of the parts of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from torchmn.comm.scattered_loaders import DividedBatches, PassParts
from torchmn.data.scatter import shard_bounds
from torchmn.exchange.sample_proportions import NOT_COMPARED, BatchShares


class Rank:
    """One rank that reads a pass of batches."""

    def __init__(self, rank: int, size: int, batches: Sequence[int]) -> None:
        self.rank, self.size = rank, size
        self.num_received = 0
        self.is_over = False
        self.known = DividedBatches()
        self.shares = BatchShares(self.known)
        self.begin(batches)

    def begin(self, batches: Sequence[int]) -> None:
        self.num_received, self.is_over = 0, False
        self.parts = PassParts(lambda: self.num_received, lambda: self.is_over)
        self.known.add_pass(self.parts)
        for batch in batches:
            self.parts.add(self.part_of(batch), batch)

    def part_of(self, batch: int) -> int:
        first, last = shard_bounds(batch, self.size, self.rank, force_equal_length=False)
        return last - first


def are_proportional(ranks: Sequence[Rank], counts: Sequence[float], num_forwards: int = 1) -> bool:
    """What all ranks find in one exchange, which is the same."""
    each = [rank.shares.of(count, num_forwards) for rank, count in zip(ranks, counts, strict=True)]
    rows = [NOT_COMPARED if own is None else own.fits for own in each]
    sums = [sum(column) for column in zip(*rows, strict=True)]
    found = {
        rank.shares.is_proportional(sums, sum(counts), own)
        for rank, own in zip(ranks, each, strict=True)
        if own is not None
    }
    assert len(found) <= 1
    return found != {False}


def made(size: int, *batches: int) -> list[Rank]:
    return [Rank(rank, size, batches) for rank in range(size)]


def read(ranks: Sequence[Rank], num: int = 1) -> None:
    for rank in ranks:
        rank.num_received += num


@pytest.mark.parametrize("views", [1, 2, 0.5])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_counts_its_part(size: int, views: float) -> None:
    batches = (8, 8, 8, 5, 1)
    ranks = made(size, *batches)
    for batch in batches:
        read(ranks)
        assert are_proportional(ranks, [views * rank.part_of(batch) for rank in ranks])


@pytest.mark.parametrize("size", [2, 3])
def test_a_constant_is_seen_at_the_first_uneven_batch(size: int) -> None:
    ranks = made(size, 12, 12, 7)
    for _ in range(2):
        read(ranks)
        assert are_proportional(ranks, [4.0] * size)
    read(ranks)
    assert not are_proportional(ranks, [4.0] * size)


def test_nodes_are_seen_at_once() -> None:
    ranks = made(2, 2, 2)
    read(ranks)
    assert not are_proportional(ranks, [7, 8])


def in_advance(ranks: Sequence[Rank], batches: Sequence[int]) -> Iterator[list[int]]:
    """What the ranks count of each batch, in a loop that requests one batch in advance."""
    read(ranks)
    for number, batch in enumerate(batches):
        if number + 1 < len(batches):
            read(ranks)
        else:
            for rank in ranks:
                rank.is_over = True
        yield [rank.part_of(batch) for rank in ranks]


def test_a_second_backward_pass_of_the_same_forward_pass() -> None:
    ranks = made(2, 5)
    read(ranks)
    assert are_proportional(ranks, [3, 2])
    assert are_proportional(ranks, [0, 0])


def test_a_rank_that_was_given_its_weight_ends_the_comparison() -> None:
    ranks = made(2, 5)
    read(ranks)
    own = ranks[0].shares.of(4, 1)
    assert own is not None
    sums = [fit + none for fit, none in zip(own.fits, NOT_COMPARED, strict=True)]
    assert ranks[0].shares.is_proportional(sums, 8, own)


def test_the_first_pass_is_refused_and_later_ones_are_warned_of_once() -> None:
    ranks = made(2, 8)
    read(ranks)
    assert are_proportional(ranks, [4, 4])
    assert all(rank.shares.is_in_first_pass for rank in ranks)
    for rank in ranks:
        rank.begin((5,))
    read(ranks)
    assert not are_proportional(ranks, [4, 4])
    assert not any(rank.shares.is_in_first_pass for rank in ranks)
    assert [ranks[0].shares.first_warning() for _ in range(2)] == [True, False]


def test_an_exchange_that_is_compared_after_the_next_pass_has_begun() -> None:
    """As under double buffering, in a loop that requests one batch in advance."""
    batches = (8, 8, 5)
    ranks = made(2, *batches)
    pending = None
    for epoch in range(2):
        if epoch:
            for rank in ranks:
                rank.begin(batches)
        for counts in in_advance(ranks, batches):
            found = [rank.shares.of(count, 1) for rank, count in zip(ranks, counts, strict=True)]
            if pending is not None:
                num_counted, shares = pending
                sums = [sum(column) for column in zip(*(s.fits for s in shares), strict=True)]
                for rank, own in zip(ranks, shares, strict=True):
                    assert rank.shares.is_proportional(sums, num_counted, own)
            pending = sum(counts), found
