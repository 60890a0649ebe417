"""An outer optimizer steps with the mean pseudo-gradient."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import on_ranks
from tests.unit.exchange.schedules.local_updates.runs import adam, simulate, wrap
from tests.unit.models import near, train, values
from torchmn.errors import UsageError
from torchmn.exchange.schedules import DiLoCo
from torchmn.testing import run_ranks

OUTER = {
    "default": None,
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.02),
    "plain": lambda parameters: torch.optim.SGD(parameters, 0.5),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_mean_pseudo_gradient_is_the_outer_gradient(size: int, outer: str) -> None:
    make = OUTER[outer]

    def rank_main(comm):
        schedule = DiLoCo(8 * size, outer=make) if make else DiLoCo(8 * size)
        model, optimizer = wrap(comm, schedule, adam)
        train(model, optimizer, comm.rank, range(8))
        return values(model)

    anchors = None

    def move(now, means, num_samples):
        nonlocal anchors, stepper
        if anchors is None:
            anchors = [a.clone() for a in now]
            stepper = (make or sgd_of_the_paper)(anchors)
        for anchor, mean in zip(anchors, means, strict=True):
            anchor.grad = mean
        stepper.step()
        return [a.clone() for a in anchors]

    stepper = None
    expected = simulate(size, [[[4, 4]] * size] * 4, move, adam)[-1]
    for result in run_ranks(rank_main, size):
        assert near(result, expected)


def sgd_of_the_paper(parameters):
    return torch.optim.SGD(parameters, 0.7, momentum=0.9, nesterov=True)


@on_ranks(2)
def test_a_schedule_of_the_outer_learning_rate_is_saved(comm) -> None:
    model, optimizer = wrap(comm, DiLoCo(8))
    rates = torch.optim.lr_scheduler.StepLR(optimizer.schedule.outer, 1, 0.5)
    train(model, optimizer, comm.rank, range(2))
    rates.step()
    _, again = wrap(comm, DiLoCo(8))
    again.load_state_dict(optimizer.state_dict())
    assert again.schedule.outer.param_groups[0]["lr"] == 0.35


def test_other_parameter_groups_are_rejected() -> None:
    def groups(parameters):
        return torch.optim.SGD([{"params": [p]} for p in parameters], 0.1)

    def rank_main(comm):
        with pytest.raises(UsageError, match="4 parameter groups.*as one group"):
            wrap(comm, DiLoCo(8, outer=groups))

    run_ranks(rank_main, 1)
