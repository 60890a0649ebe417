"""Rounds of local results, put together once at the root."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.limits import limit
from torchmn.comm import Communicator
from torchmn.errors import CommunicationError, UsageError
from torchmn.testing import run_ranks
from torchmn.train.evaluation import GenericMultiNodeEvaluator


class Numbers(GenericMultiNodeEvaluator):
    num_aggregated = 0

    def calc_local(self, number: int) -> tuple[int, int]:
        assert not self.targets["main"].training
        assert not torch.is_grad_enabled()
        return (self.comm.rank, number)

    def aggregate(self, results: list[Any]) -> list[Any]:
        self.num_aggregated += 1
        return results


@pytest.mark.parametrize("lengths", [(9, 7), (2, 0), (0, 0), (1, 3, 0, 2), (5,)])
@pytest.mark.parametrize("root", [0, -1])
def test_round_robin_order_at_the_root_only(lengths: tuple[int, ...], root: int) -> None:
    root = root % len(lengths)

    def body(comm: Communicator) -> tuple[Any, int]:
        batches = [(k,) for k in range(lengths[comm.rank])]
        evaluator = Numbers(comm, batches, nn.Linear(1, 1), root=root)
        return evaluator(), evaluator.num_aggregated

    expected = [(r, k) for k in range(10) for r, n in enumerate(lengths) if k < n]
    for rank, (result, num_aggregated) in enumerate(run_ranks(body, len(lengths))):
        assert result == (expected if rank == root else None)
        assert num_aggregated == (1 if rank == root else 0)


def test_layers_that_do_not_train_stay_so() -> None:
    def body(comm: Communicator) -> list[bool]:
        model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1).eval())
        Numbers(comm, [(1,)], model)()
        return [module.training for module in model.modules()]

    assert run_ranks(body, 1) == [[True, True, False]]


class Fails(Numbers):
    def calc_local(self, number: int) -> Any:
        if self.comm.rank == 1 and number == 2:
            raise KeyError("no such key")
        return number


class FailsToAggregate(Numbers):
    def aggregate(self, results: list[Any]) -> Any:
        raise ArithmeticError("no result")


@pytest.mark.parametrize(
    ("kind", "failing", "own"), [(Fails, 1, KeyError), (FailsToAggregate, 0, ArithmeticError)]
)
def test_one_rank_raises_and_all_ranks_raise(kind: Any, failing: int, own: type[Exception]) -> None:
    begin_s = time.monotonic()

    def body(comm: Communicator) -> Exception | None:
        try:
            kind(comm, [(k,) for k in range(5)], nn.Linear(1, 1))()
        except Exception as error:
            return error
        return None

    errors = run_ranks(body, 3, timeout_s=limit(30))
    assert time.monotonic() - begin_s < limit(15)
    for rank, error in enumerate(errors):
        assert isinstance(error, own if rank == failing else CommunicationError)
        assert rank == failing or f"rank {failing} raised {own.__name__}" in str(error)


def test_none_is_no_result() -> None:
    class Forgetful(Numbers):
        def calc_local(self, number: int) -> Any:
            return None

    with pytest.raises(UsageError, match="calc_local"):
        run_ranks(lambda comm: Forgetful(comm, [(1,)], nn.Linear(1, 1))(), 1)


def test_the_hook_is_called_for_every_batch() -> None:
    reported: list[int] = []

    def body(comm: Communicator) -> None:
        Numbers(comm, [(1,), (2,)], nn.Linear(1, 1), progress_hook=reported.append)()

    run_ranks(body, 1)
    assert reported == [1, 2]
