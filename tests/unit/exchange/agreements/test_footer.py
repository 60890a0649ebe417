"""A footer is the concatenation of its agreements, which are called when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from torch import Tensor

from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.agreements.footer import Footer
from torchmn.exchange.agreements.given_up import GivenUp
from torchmn.exchange.agreements.late_ranks import LateRanks
from torchmn.exchange.agreements.learning_rates import LearningRates
from torchmn.exchange.agreements.loaded_state import LoadedState
from torchmn.exchange.agreements.num_exchanges import NumExchanges

HERE = PassContext(step=3, weight=2.0, num_samples=5.0, is_active=True)
LEFT = PassContext(step=3, weight=0.0, num_samples=0.0, is_active=False)


class Own(Agreement):
    """Writes down what is called."""

    num_values = 2

    def __init__(self) -> None:
        self.calls: list[str] = []

    def contribute(self, context: PassContext) -> Sequence[float]:
        self.calls.append("contribute")
        return 7.0, 0.0

    def write_values(self, values: Tensor, context: PassContext) -> None:
        self.calls.append("write_values")
        values[1] = 8.0

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


def test_each_agreement_has_its_slice() -> None:
    footers = [Footer(comm(rank, 3), [Own(), LateRanks()]) for rank in range(3)]
    summed(footers, [HERE, HERE, LEFT])
    for footer in footers:
        assert (footer.weights.total, footer.weights.num_samples) == (4.0, 10.0)
        assert footer.get(Own).sums == [21.0, 24.0]
        assert footer.get(LateRanks).sums == [0.0]
        assert footer.find(GivenUp) is None
        footer.check(HERE)
        assert footer.get(Own).calls[-1] == "check [7.0, 0.0] [21.0, 24.0] 2"
        footer.report(HERE)
        footer.report(HERE)  # once
        assert footer.get(Own).calls.count("report") == 1


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
    count, rate = NumExchanges(), [0.1]
    first, second = (Footer(comm(0, 1), [count, LearningRates(lambda: rate[0])]) for _ in range(2))
    summed([first], [HERE])
    count.num, rate[0] = 1, 0.2
    summed([second], [HERE])
    first.check(HERE)
    second.check(HERE)
    assert count.own == [1.0]
