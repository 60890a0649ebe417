"""Local-update schedules where a script replaces parameters between blocks, as the best model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import on_ranks
from tests.unit.exchange.schedules.local_updates.runs import wrap
from tests.unit.models import equal, train, values
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.errors import RankMismatchError, UsageError
from torchmn.exchange.replicas import different_tensors
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, LocalUpdateSchedule, PeriodicAverage
from torchmn.testing import run_ranks

SCHEDULES = [PeriodicAverage, BlockMomentum, DiLoCo]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap_steps": 2},
    {"overlap_steps": 2, "eager": True},
    {"num_fragments": 2},
    {"num_fragments": 2, "overlap_steps": 1},
    {"intra_node": "every_step"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", SCHEDULES)
def test_flush_keeps_a_state_that_all_ranks_have_loaded(
    make: type[LocalUpdateSchedule], options: dict[str, Any]
) -> None:
    """The next block begins there: none of what was trained before is in it."""

    def rank_main(comm: Communicator) -> tuple[list[Tensor], ...]:
        model, optimizer = wrap(comm, make(64, **options))
        train(model, optimizer, comm.rank, range(3))
        optimizer.flush()
        best = values(model)
        train(model, optimizer, comm.rank, range(5))
        optimizer.flush()
        load(model, best)
        optimizer.flush()
        assert different_tensors(comm, [model]) == []
        loaded = values(model)
        train(model, optimizer, comm.rank, [8])  # of the first block after it
        return best, loaded, list(optimizer.schedule.anchors.values())

    topology = Topology.blocks([2, 2]) if "intra_node" in options else None
    for best, loaded, anchors in run_ranks(rank_main, 4, topology=topology):
        assert equal(loaded, best)
        assert equal(anchors, best)


@pytest.mark.parametrize("num_steps", [3, 4], ids=["within_a_block", "after_its_end"])
@pytest.mark.parametrize("after", ["step", "flush"])
@pytest.mark.parametrize("make", SCHEDULES)
def test_a_load_without_flush_is_refused(
    make: type[LocalUpdateSchedule], after: str, num_steps: int
) -> None:
    """The outer step would take it for what was learned."""

    def rank_main(comm: Communicator) -> None:
        model, optimizer = wrap(comm, make(16))
        best = values(model)
        train(model, optimizer, comm.rank, range(num_steps))
        load(model, best)
        if after == "step":
            train(model, optimizer, comm.rank, [num_steps])
        else:
            optimizer.flush()

    with pytest.raises(UsageError, match=r"Call optimizer.flush\(\) on all ranks before you load"):
        run_ranks(rank_main, 2)


@pytest.mark.filterwarnings("ignore:.*saved in the middle of a block")
@pytest.mark.parametrize("make", SCHEDULES)
def test_a_state_that_is_taken_back_changes_nothing(make: type[LocalUpdateSchedule]) -> None:
    """Averaged parameters are loaded, evaluated and replaced by those of training."""

    def rank_main(comm: Communicator, evaluates: bool) -> list[Tensor]:
        model, optimizer = wrap(comm, make(16))
        for step in range(7):
            train(model, optimizer, comm.rank, [step])
            if evaluates:
                own = values(model)
                load(model, [torch.zeros_like(value) for value in own])
                load(model, own)
        optimizer.flush()
        return values(model)

    plain = run_ranks(lambda comm: rank_main(comm, False), 2)
    evaluated = run_ranks(lambda comm: rank_main(comm, True), 2)
    assert all(equal(a, b) for a, b in zip(plain, evaluated, strict=True))


@pytest.mark.parametrize("is_model_first", [True, False])
@pytest.mark.parametrize("make", SCHEDULES)
@on_ranks(2)
def test_a_job_goes_back_to_a_state_of_its_own(
    comm: Communicator, make: type[LocalUpdateSchedule], is_model_first: bool
) -> None:
    """Of model and optimizer, in the middle of a block."""
    model, optimizer = wrap(comm, make(16))

    def run(num_steps: int) -> list[Tensor]:
        train(model, optimizer, comm.rank, range(num_steps))
        return values(model)

    run(3)
    saved, state = values(model), copy.deepcopy(optimizer.state_dict())
    first = run(4)
    if is_model_first:
        load(model, saved)
    optimizer.load_state_dict(state)
    if not is_model_first:
        load(model, saved)
    assert equal(run(4), first)


def test_one_rank_alone_may_not_load() -> None:
    def rank_main(comm: Communicator) -> None:
        model, optimizer = wrap(comm, PeriodicAverage(16))
        best = values(model)
        train(model, optimizer, comm.rank, range(4))
        optimizer.flush()
        if comm.rank == 0:
            load(model, best)
        optimizer.flush()

    with pytest.raises(RankMismatchError, match="started the block with different parameters"):
        run_ranks(rank_main, 2)


@on_ranks(2)
def test_a_copy_of_the_model_is_loaded_as_any_model(comm: Communicator) -> None:
    model, optimizer = wrap(comm, PeriodicAverage(16))
    train(model, optimizer, comm.rank, [0])
    twin = copy.deepcopy(model)
    load(twin, [torch.zeros_like(value) for value in values(twin)])
    train(model, optimizer, comm.rank, [1])


def load(model: nn.Module, state: Sequence[Tensor]) -> None:
    model.load_state_dict(dict(zip(model.state_dict(), state, strict=True)))
