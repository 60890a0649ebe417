"""What a step is of: the parts that loaders have handed out, and the counts that fit them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from torchmn.data.divided_batches import DividedBatches, LoaderPass
from torchmn.data.scatter import shard_bounds
from torchmn.exchange.step_batches import Counted, Share, StepBatches


class Rank:
    """One rank that reads passes over a loader."""

    def __init__(self, rank: int, size: int, batches: Sequence[int]) -> None:
        self.rank, self.size = rank, size
        self.known = DividedBatches()
        self.steps = StepBatches(self.known, size)
        self.begin(batches)

    def begin(self, batches: Sequence[int]) -> None:
        self.now = LoaderPass(self.known, 0, is_of_loader=True)
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


def taken(ranks: Sequence[Rank], counts: Sequence[float], num_forwards: int = 1) -> list[Share]:
    return [
        rank.steps.take(Counted(n, num_forwards, n**2 / num_forwards))
        for rank, n in zip(ranks, counts, strict=True)
    ]


def are_right(ranks: Sequence[Rank], counts: Sequence[float], num_forwards: int = 1) -> bool:
    """What all ranks find in one exchange."""
    each = taken(ranks, counts, num_forwards)
    seen = {own.seen for own in each}
    is_same = None in seen or len(seen) == 1
    return is_same and not any(own.is_miscounted for own in each)


@pytest.mark.parametrize("views", [1, 2, 0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_has_the_weight_of_its_part(size: int, views: int) -> None:
    """Also where no forward pass was seen."""
    batches = (8, 8, 8, 5, 1)
    ranks = made(size, *batches)
    for batch in batches:
        read(ranks)
        counts = [views * rank.part_of(batch) for rank in ranks]
        shares = [rank.steps.look(Counted(n, 1)) for rank, n in zip(ranks, counts, strict=True)]
        assert [own.weight for own in shares] == [rank.part_of(batch) for rank in ranks]
        assert are_right(ranks, counts)


@pytest.mark.parametrize("size", [2, 3])
def test_a_constant_is_seen_at_the_first_uneven_batch(size: int) -> None:
    ranks = made(size, 12, 12, 7)
    for _ in range(2):
        read(ranks)
        assert are_right(ranks, [5.0] * size)
    read(ranks)
    assert not are_right(ranks, [5.0] * size)


def test_a_constant_that_every_part_divides_shows_between_ranks() -> None:
    ranks = made(2, 3)
    read(ranks)
    each = taken(ranks, [4, 4])
    assert not any(own.is_miscounted for own in each)
    assert each[0].seen != each[1].seen


def test_a_part_of_equal_parts_shows_between_ranks() -> None:
    ranks = made(2, 8)
    read(ranks)
    assert not are_right(ranks, [4, 3])


def test_one_rank_may_see_its_part_twice_where_parts_are_equal() -> None:
    """As where a rank draws by its own random numbers whether it adds a second loss."""
    ranks = made(2, 8, 9)
    read(ranks)
    assert are_right(ranks, [4, 8])
    read(ranks)
    assert not are_right(ranks, [5, 8])


def test_a_batch_that_one_rank_leaves_out_shows_at_the_first_exchange() -> None:
    """Of those that ranks pack, as many as fill a step, all are seen."""
    ranks = made(2, 8, 8, 8, 8)
    read(ranks[:1])
    read(ranks[1:], 2)
    assert not are_right(ranks, [4, 4])
    ranks = made(2, 8, 8, 8, 8)
    read(ranks[:1])
    read(ranks[1:], 2)
    assert are_right(ranks, [4, 8])


def test_a_batch_that_one_rank_leaves_out_of_accumulated_ones_shows() -> None:
    ranks = made(2, *[8] * 8)
    read(ranks, 4)
    assert are_right(ranks, [16, 16], 4)
    read(ranks, 4)
    assert not are_right(ranks, [16, 12], 4)


def test_a_second_backward_pass_of_the_same_forward_pass() -> None:
    ranks = made(2, 5)
    read(ranks)
    assert are_right(ranks, [3, 2])
    assert [own.weight for own in taken(ranks, [0, 0])] == [3, 2]


def test_a_rank_without_a_pass_has_no_weight_and_ends_the_comparison() -> None:
    ranks = made(2, 5)
    read(ranks)
    own, other = ranks[0].steps.take(Counted(3, 1)), ranks[1].steps.take(Counted(), is_used=False)
    assert (own.weight, other.weight) == (3, 0)
    assert other.seen is None


def test_the_first_pass_is_told_from_later_ones() -> None:
    ranks = made(2, 8)
    read(ranks)
    assert are_right(ranks, [4, 4])
    assert all(rank.steps.is_in_first_pass for rank in ranks)
    for rank in ranks:
        rank.begin((5,))
    read(ranks)
    assert not are_right(ranks, [4, 4])
    assert not any(rank.steps.is_in_first_pass for rank in ranks)


def test_batches_that_are_kept_come_in_any_order_and_again() -> None:
    (rank,) = made(2, 8, 7, 8)[1:]
    read([rank], 3)
    rank.now.is_over = True
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
    assert taken([rank], [5])[0].is_miscounted


def test_batches_of_several_sizes_in_one_step_have_no_weight() -> None:
    (rank,) = made(2, 8, 8, 8, 5)[1:]
    read([rank], 2)
    assert not rank.steps.take(Counted(8, 2, 2 * 4**2)).is_miscounted
    read([rank], 2)
    assert rank.steps.take(Counted(6, 2, 4**2 + 2**2)).is_miscounted


def test_an_optimizer_made_later_follows_the_batch_in_hand_and_none_that_was_trained_with() -> None:
    (rank,) = made(2, 9, 9, 9)[:1]
    read([rank])
    assert taken([rank], [5])[0].weight == 5
    read([rank])
    later = StepBatches(rank.known, 2)
    assert later.take(Counted(5, 1)).weight == 5
    rank.now.is_over = True
    assert StepBatches(rank.known, 2).take(Counted(3, 1)) is None


def test_a_pass_is_not_kept_when_its_loader_is_trained_with_again() -> None:
    (rank,) = made(2, 9)[:1]
    read([rank])
    rank.now.is_over = True
    rank.begin((8, 8))
    assert rank.known.passes == [rank.now]
    read([rank])
    assert rank.steps.take(Counted(4, 1)).weight == 4
