"""What a step is of: the parts that loaders have handed out, and the counts that fit them."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Sequence

import pytest

from torchmn.data.divided_batches import DividedBatches, LoaderPass
from torchmn.data.scatter import shard_bounds
from torchmn.exchange.sample_proportions import BatchShares, Shares


class Loop:
    """What the script holds while it is in a pass."""


class Rank:
    """One rank that reads passes over a loader."""

    def __init__(self, rank: int, size: int, batches: Sequence[int]) -> None:
        self.rank, self.size = rank, size
        self.known = DividedBatches()
        self.shares = BatchShares(self.known, size)
        self.begin(batches)

    def begin(self, batches: Sequence[int]) -> None:
        self.now = LoaderPass(self.known, 0, is_of_loader=True)
        self.loop = Loop()
        self.now.loop = weakref.ref(self.loop)
        self.now.thread = threading.get_ident()
        for batch in batches:
            self.now.add(self.part_of(batch), batch)

    def part_of(self, batch: int) -> int:
        first, last = shard_bounds(batch, self.size, self.rank, force_equal_length=False)
        return last - first


def made(size: int, *batches: int) -> list[Rank]:
    return [Rank(rank, size, batches) for rank in range(size)]


def read(ranks: Sequence[Rank], num: int = 1) -> None:
    for rank in ranks:
        for _ in range(num):
            rank.now.num_received += 1


def taken(ranks: Sequence[Rank], counts: Sequence[float], num_forwards: int = 1) -> list[Shares]:
    return [rank.shares.take(n, num_forwards) for rank, n in zip(ranks, counts, strict=True)]


def are_right(ranks: Sequence[Rank], counts: Sequence[float], num_forwards: int = 1) -> bool:
    """What all ranks find in one exchange, which is the same."""
    each = taken(ranks, counts, num_forwards)
    fit, num = sum(own.fit for own in each), sum(own.num_counted for own in each)
    found = {own.is_proportional(fit, num) for own in each}
    assert len(found) == 1
    return found == {True} and not any(own.is_miscounted for own in each)


@pytest.mark.parametrize("views", [1, 2, 0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_has_the_weight_of_its_part(size: int, views: int) -> None:
    """Also where no forward pass was seen."""
    batches = (8, 8, 8, 5, 1)
    ranks = made(size, *batches)
    for batch in batches:
        read(ranks)
        counts = [views * rank.part_of(batch) for rank in ranks]
        weights = [rank.shares.look(n, 1).weight for rank, n in zip(ranks, counts, strict=True)]
        assert weights == [rank.part_of(batch) for rank in ranks]
        assert are_right(ranks, counts)


@pytest.mark.parametrize("size", [2, 3])
def test_a_constant_is_seen_at_the_first_uneven_batch(size: int) -> None:
    ranks = made(size, 12, 12, 7)
    for _ in range(2):
        read(ranks)
        assert are_right(ranks, [4.0] * size)
    read(ranks)
    assert not are_right(ranks, [4.0] * size)


def test_a_constant_that_every_part_divides_shows_in_the_sum() -> None:
    ranks = made(2, 3)
    read(ranks)
    each = taken(ranks, [4, 4])
    assert not any(own.is_miscounted for own in each)
    assert not each[0].is_proportional(sum(own.fit for own in each), 8)


def test_a_second_backward_pass_of_the_same_forward_pass() -> None:
    ranks = made(2, 5)
    read(ranks)
    assert are_right(ranks, [3, 2])
    assert [own.weight for own in taken(ranks, [0, 0])] == [3, 2]


def test_a_rank_without_a_pass_has_no_weight_and_ends_the_comparison() -> None:
    ranks = made(2, 5)
    read(ranks)
    own, other = ranks[0].shares.take(3, 1), ranks[1].shares.take(0, 0, is_used=False)
    assert (own.weight, other.weight) == (3, 0)
    assert own.is_proportional(own.fit + other.fit, 3)


def test_the_first_pass_is_refused_and_later_ones_are_warned_of_once() -> None:
    ranks = made(2, 8)
    read(ranks)
    assert are_right(ranks, [4, 4])
    assert all(rank.shares.is_in_first_pass for rank in ranks)
    for rank in ranks:
        rank.begin((5,))
    read(ranks)
    assert not are_right(ranks, [4, 4])
    assert not any(rank.shares.is_in_first_pass for rank in ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ranks[0].shares.warn("some text")
    assert [str(each.message) for each in caught] == ["some text"]


def test_batches_that_are_kept_come_in_any_order_and_again() -> None:
    (rank,) = made(2, 8, 7, 8)[1:]
    read([rank], 3)
    del rank.loop
    for counts in ([4, 3, 4], [3, 4, 4], [4, 4, 3]):
        for num in counts:
            (own,) = taken([rank], [num])
            assert (own.weight, own.is_miscounted) == (num, False)
    (own,) = taken([rank], [5])
    assert own.is_miscounted


def test_a_constant_is_seen_in_a_loop_that_requests_early() -> None:
    (rank,) = made(2, 8, 8, 7)[1:]
    read([rank], 2)
    assert not taken([rank], [4])[0].is_miscounted
    read([rank])
    assert not taken([rank], [4])[0].is_miscounted
    rank.now.has_ended = True
    assert taken([rank], [4])[0].is_miscounted


def test_batches_of_several_sizes_in_one_step_have_no_weight() -> None:
    (rank,) = made(2, 8, 8, 8, 5)[1:]
    read([rank], 2)
    assert not taken([rank], [8], 2)[0].is_miscounted
    read([rank], 2)
    assert taken([rank], [6], 2)[0].is_miscounted


def test_an_optimizer_made_later_follows_the_batch_in_hand_and_none_that_was_trained_with() -> None:
    (rank,) = made(2, 9, 9, 9)[:1]
    read([rank])
    assert taken([rank], [5])[0].weight == 5
    read([rank])
    later = BatchShares(rank.known, 2)
    assert later.take(5, 1).weight == 5
    del rank.loop
    assert BatchShares(rank.known, 2).take(3, 1) is None


def test_a_pass_is_not_kept_when_its_loader_is_trained_with_again() -> None:
    (rank,) = made(2, 9)[:1]
    read([rank])
    rank.now.has_ended = True
    rank.begin((8, 8))
    read([rank])
    assert rank.shares.take(4, 1).weight == 4
    assert rank.known.passes == [rank.now]
    for _ in range(40):
        rank.begin((9,))
    gc.collect()
    assert len(rank.known.passes) < 40
