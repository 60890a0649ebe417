"""Frozen parameters are in no block: their bytes would be for nothing, as with adapters (LoRA)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from tests.unit.exchange.schedules.local_updates.runs import adam, sgd
from tests.unit.models import batch, equal, loss_of, mlp, near, train, values
from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.errors import UnsupportedError
from torchmn.exchange.optimizer import MultiNodeOptimizer
from torchmn.exchange.replicas import different_tensors
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, LocalUpdateSchedule, PeriodicAverage
from torchmn.testing import run_ranks

SCHEDULES = [PeriodicAverage, BlockMomentum, DiLoCo]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap_steps": 2},
    {"overlap_steps": 2, "eager": True},
    {"num_fragments": 2},
]
FIRST, LAST = ["0.weight", "0.bias"], ["2.weight", "2.bias"]


def wrap(
    comm: Communicator, schedule: LocalUpdateSchedule, **options: object
) -> tuple[nn.Module, MultiNodeOptimizer]:
    """The first layer is frozen, but in the optimizer, as ``AdamW(model.parameters())`` has it."""
    model = mlp()
    model[0].requires_grad_(False)
    return model, create_multi_node_optimizer(
        adam(model), comm, model, schedule=schedule, **options
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", SCHEDULES)
def test_the_numbers_are_those_without_frozen_parameters_in_the_optimizer(
    make: type[LocalUpdateSchedule], options: dict[str, Any]
) -> None:
    def rank_main(comm: Communicator, leaves_out: bool) -> Any:
        model = mlp()
        model[0].requires_grad_(False)
        given = model[2:] if leaves_out else model
        optimizer = create_multi_node_optimizer(
            adam(given), comm, model, schedule=make(16, **options)
        )
        train(model, optimizer, comm.rank, range(9))
        anchors = list(optimizer.schedule.anchors)
        optimizer.flush()
        return anchors, values(model)

    alone = run_ranks(lambda comm: rank_main(comm, True), 2)
    both = run_ranks(lambda comm: rank_main(comm, False), 2)
    for (anchors, found), (_, wanted) in zip(both, alone, strict=True):
        assert anchors == LAST
        assert equal(found, wanted)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", SCHEDULES)
@on_ranks(2)
def test_unfrozen_parameters_are_exchanged_from_the_next_step_on(
    comm: Communicator, make: type[LocalUpdateSchedule], options: dict[str, Any]
) -> None:
    """In the middle of a block, on ranks whose blocks end at other steps."""
    model, optimizer = wrap(comm, make(24, **options), codec="int8")
    first = values(model)[:2]
    sizes = (3, 5)[comm.rank]
    train(model, optimizer, comm.rank, range(5), sizes)
    assert equal(values(model)[:2], first)
    model[0].requires_grad_(True)
    train(model, optimizer, comm.rank, range(5, 12), sizes)
    model[0].requires_grad_(False)  # what was learned is exchanged all the same
    train(model, optimizer, comm.rank, range(12, 15), sizes)
    assert list(optimizer.schedule.anchors) == [*FIRST, *LAST]
    optimizer.flush()
    assert different_tensors(comm, [model]) == []
    assert not equal(values(model)[:2], first)


def test_a_block_after_unfreezing_is_the_mean_of_the_ranks() -> None:
    def rank_main(comm: Communicator) -> Any:
        model, optimizer = wrap(comm, PeriodicAverage(8))
        for step in range(3):  # blocks of one step
            train(model, optimizer, comm.rank, [step])
        model[0].requires_grad_(True)
        before = values(model)
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, 3)).backward()
        own = copy.deepcopy(model), copy.deepcopy(optimizer.inner.state_dict())
        for mine, theirs in zip(own[0].parameters(), model.parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        local = adam(own[0])
        local.load_state_dict(own[1])
        local.step()
        optimizer.step()
        return before, values(own[0]), values(model)

    (before, one, found), (_, other, also) = run_ranks(rank_main, 2)
    assert equal(found, also)
    assert near(found, [(a + b) / 2 for a, b in zip(one, other, strict=True)], 1e-12)
    assert not any(torch.equal(a, b) for a, b in zip(before, found, strict=True))


@on_ranks(2)
def test_a_frozen_parameter_with_a_gradient_of_the_script_is_exchanged(comm: Communicator) -> None:
    """torch's optimizers change it: they look at the gradient alone."""
    model, optimizer = wrap(comm, PeriodicAverage(8))
    first = values(model)[:2]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step)).backward()
        for parameter in model[0].parameters():
            parameter.grad = torch.full_like(parameter, comm.rank + 1.0)
        optimizer.step()
    optimizer.flush()
    assert different_tensors(comm, [model]) == []
    assert not equal(values(model)[:2], first)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(2)
def test_a_state_of_after_unfreezing_is_loaded_where_all_is_frozen_still(
    comm: Communicator, options: dict[str, Any]
) -> None:
    """A script resumes before the lines that unfreeze: the same bits as without a break."""
    model, optimizer = wrap(comm, DiLoCo(24, **options))
    train(model, optimizer, comm.rank, [0])
    model[0].requires_grad_(True)
    train(model, optimizer, comm.rank, range(1, 6))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, resumed = wrap(comm, DiLoCo(24, **options))
    outer = resumed.schedule.outer
    again.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    again[0].requires_grad_(True)
    assert resumed.schedule.outer is not outer  # of more anchors
    for step in range(6, 12):
        train(model, optimizer, comm.rank, [step])
        train(again, resumed, comm.rank, [step])
    optimizer.flush()
    resumed.flush()
    assert equal(values(model), values(again))


def test_unfreezing_inside_of_join_is_refused() -> None:
    def rank_main(comm: Communicator) -> None:
        model, optimizer = wrap(comm, PeriodicAverage(16))
        with optimizer.join():
            train(model, optimizer, comm.rank, [0])
            model[0].requires_grad_(True)
            train(model, optimizer, comm.rank, [1])

    with pytest.raises(UnsupportedError, match=r"unfrozen inside of join\(\).*before join\(\)"):
        run_ranks(rank_main, 2)


@on_ranks(2)
def test_where_all_are_frozen_all_are_exchanged(comm: Communicator) -> None:
    """Nothing says yet which of them are trained."""
    model = mlp().requires_grad_(False)
    optimizer = create_multi_node_optimizer(sgd(model), comm, model, schedule=PeriodicAverage(16))
    assert list(optimizer.schedule.anchors) == [name for name, _ in model.named_parameters()]
