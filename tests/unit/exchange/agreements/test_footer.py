"""A footer is the concatenation of its agreements, which are called when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torchmn.errors import RankMismatchError
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.agreements.counts import NumExchanges
from torchmn.exchange.agreements.facts import LateRanks
from torchmn.exchange.agreements.footer import Footer
from torchmn.exchange.agreements.learning_rates import LearningRates
from torchmn.exchange.agreements.together import GivenUp, LoadedState

HERE = PassContext(step=3, weight=2.0, num_samples=5.0, is_active=True)
LEFT = PassContext(step=3, weight=0.0, num_samples=0.0, is_active=False)


class Own(Agreement):
    """Writes down what is called; its numbers are on a device or not."""

    num_values = 2

    def __init__(self, *, is_on_device: bool = False) -> None:
        self.calls: list[str] = []
        self.is_on_device = is_on_device

    def contribute(self, context: PassContext) -> Sequence[float]:
        self.calls.append("contribute")
        return () if self.is_on_device else (7.0, 8.0)

    def write_values(self, values: Tensor, context: PassContext) -> None:
        self.calls.append("write_values")
        values[0], values[1] = 7.0, 8.0

    def check(self, context: PassContext) -> bool:
        self.calls.append(f"check {self.own} {self.sums} {self.num_active}")
        return True

    def report(self, context: PassContext) -> None:
        self.calls.append("report")


def comm(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, size=size, rank_label=f"rank {rank}")


def summed(footers: Sequence[Footer], contexts: Sequence[PassContext]) -> None:
    """One exchange among footers, one for each rank."""
    for footer, context in zip(footers, contexts, strict=True):
        footer.begin(context)
        footer.write(context)
    total = sum(footer.values for footer in footers)
    for footer in footers:
        footer.values = total.clone()
        footer.read()


@pytest.mark.parametrize("is_on_device", [False, True])
def test_each_agreement_has_its_slice(is_on_device: bool) -> None:
    footers = [
        Footer(comm(rank, 3), [Own(is_on_device=is_on_device), LateRanks()]) for rank in range(3)
    ]
    summed(footers, [HERE, HERE, LEFT])
    for footer in footers:
        assert (footer.weights.total, footer.weights.num_samples) == (4.0, 10.0)
        own = footer.get(Own)
        assert own.sums == [21.0, 24.0]
        assert footer.get(LateRanks).sums == [0.0, 0.0]
        assert footer.find(GivenUp) is None
        footer.check(HERE)
        contributed = "[0.0, 0.0]" if is_on_device else "[7.0, 8.0]"
        assert own.calls[-1] == f"check {contributed} [21.0, 24.0] 2"
        assert ("write_values" in own.calls) == is_on_device
        footer.report(HERE)
        footer.report(HERE)  # once
        assert own.calls.count("report") == 1


@pytest.mark.parametrize("agrees_if_equal", [False, True])
@pytest.mark.parametrize("context", [HERE, LEFT])
def test_equal_numbers_are_not_checked_where_they_mean_agreement(
    agrees_if_equal: bool, context: PassContext
) -> None:
    """Unless a rank is not active: what it contributes is something else then."""
    footers = [Footer(comm(rank, 2), [Own()]) for rank in range(2)]
    for footer in footers:
        footer.get(Own).agrees_if_equal = agrees_if_equal
    summed(footers, [HERE, context])
    for footer in footers:
        footer.check(HERE)
        is_checked = any(call.startswith("check") for call in footer.get(Own).calls)
        assert is_checked == (context is LEFT or not agrees_if_equal)


def test_an_idle_agreement_is_not_called_and_sums_of_zero_are_not_checked() -> None:
    footer = Footer(comm(0, 1), [Own()])
    footer.get(Own).is_idle = True
    summed([footer], [HERE])
    footer.check(HERE)
    assert footer.get(Own).calls == []


def test_sums_that_are_held() -> None:
    footer = Footer(comm(0, 2), [Own()])
    summed([footer], [HERE])
    footer.hold({footer.weights: (3.0, 1.0, 0.0, 0.0)})
    footer.read()
    assert footer.weights.total == 3.0
    assert footer.get(Own).sums == [0.0, 0.0]


@pytest.mark.parametrize("kind", [GivenUp, LoadedState])
@pytest.mark.parametrize("which", [{1}, {0, 2}, {0, 1, 2}])
def test_what_all_ranks_do_or_none(kind: type[GivenUp], which: set[int]) -> None:
    """It is told once, by an object that two footers of a rank share."""
    shared = [kind() for _ in range(3)]
    rounds = [[Footer(comm(r, 3), [each]) for r, each in enumerate(shared)] for _ in range(2)]
    for rank in which:
        shared[rank].note()
    for number, footers in enumerate(rounds):
        summed(footers, [HERE] * 3)
        for footer in footers:
            assert footer.is_used() == (kind is LoadedState or number == 1)
            if number == 1 or len(which) == 3:
                footer.check(HERE)
                continue
            names = "rank 1 " if which == {1} else "2 of 3 ranks each "
            with pytest.raises(Exception, match=names + kind.what[:6]):
                footer.check(HERE)


def test_a_rank_that_has_left_its_loop_needs_not_load_a_state() -> None:
    footers = [Footer(comm(rank, 2), [LoadedState()]) for rank in range(2)]
    footers[0].get(LoadedState).note()
    summed(footers, [HERE, LEFT])
    for footer in footers:
        footer.check(HERE)


def test_an_exchange_is_checked_after_the_next_one_has_contributed() -> None:
    """As with two sets of buckets, whose footers share what counts exchanges."""
    inners = [torch.optim.SGD([torch.zeros(1)], lr=0.1 + rank) for rank in range(2)]
    counts = [NumExchanges(1) for _ in inners]
    first, second = (
        [
            Footer(comm(rank, 2), [counts[rank], LearningRates(inner)])
            for rank, inner in enumerate(inners)
        ]
        for _ in range(2)
    )
    summed(first, [HERE] * 2)
    for count, inner in zip(counts, inners, strict=True):
        count.num, inner.param_groups[0]["lr"] = 1, 0.2
    summed(second, [HERE] * 2)
    for footer in second:
        footer.check(HERE)
    for rank, footer in enumerate(first):
        with pytest.raises(RankMismatchError, match=f"{0.1 + rank:g} here, 0.6 in the mean"):
            footer.check(HERE)
