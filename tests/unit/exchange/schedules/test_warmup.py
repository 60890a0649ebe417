"""The codec comes in at one step on all ranks."""

from __future__ import annotations

import copy

import pytest

from tests.unit.exchange.schedules.local_updates.runs import momentum, train
from tests.unit.models import equal, mlp, values
from torchmn import create_multi_node_optimizer
from torchmn.errors import UnsupportedError, UsageError
from torchmn.exchange.replicas import different_tensors
from torchmn.exchange.schedules import DoubleBuffering, EveryStep, Warmup
from torchmn.testing import run_ranks


def wrap(comm, schedule, codec="float16"):
    model = mlp()
    optimizer = create_multi_node_optimizer(
        momentum(model), comm, model, schedule=schedule, codec=codec, weight="samples"
    )
    return model, optimizer


def num_encoded(comm) -> int:
    return sum(entry.name == "scatter_float16" for entry in comm.flight_recorder.entries())


def test_exact_until_then_and_encoded_afterwards() -> None:
    """Batches of 2 and 9: 33 samples after three steps."""

    def rank_main(comm):
        model, optimizer = wrap(comm, Warmup(30, EveryStep()))
        exact, each = wrap(comm, "every_step", None)
        for step in range(6):
            size = 9 if comm.rank else 2
            train(model, optimizer, comm.rank, step, size)
            train(exact, each, comm.rank, step, size)
            assert equal(values(model), values(exact)) is (step < 3)
            assert num_encoded(comm) == max(0, step - 2)
            assert different_tensors(comm, [model]) == []
        assert optimizer.schedule.num_warmup_samples == 33

    run_ranks(rank_main, 2)


def test_ranks_that_have_left_switch_as_well() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, Warmup(14, EveryStep()))
        with optimizer.join():
            for step in range(1 if comm.rank else 5):
                train(model, optimizer, comm.rank, step)
        assert different_tensors(comm, [model]) == []
        assert optimizer.schedule.num_warmup_samples == 16
        assert num_encoded(comm) > 0

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("saved_after", [1, 4])
def test_resuming_is_bit_equal(saved_after: int) -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, Warmup(20, EveryStep()), "int8")
        for step in range(saved_after):
            train(model, optimizer, comm.rank, step)
        again, resumed = wrap(comm, Warmup(20, EveryStep()), "int8")
        train(again, resumed, comm.rank, 9, 30)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(saved_after, saved_after + 4):
            train(model, optimizer, comm.rank, step)
            train(again, resumed, comm.rank, step)
        assert equal(values(model), values(again))

    run_ranks(rank_main, 2)


def test_one_rank_alone() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, Warmup(6, EveryStep()))
        for step in range(3):
            train(model, optimizer, 0, step)
        assert all(v.isfinite().all() for v in values(model))

    run_ranks(rank_main, 1)


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf")])
def test_values_that_make_no_sense(after: float) -> None:
    with pytest.raises(UsageError, match="must be 0 or more"):
        Warmup(after, EveryStep())


def test_schedules_that_cannot_follow() -> None:
    with pytest.raises(UnsupportedError, match="cannot be followed by DoubleBuffering"):
        Warmup(4, DoubleBuffering())
