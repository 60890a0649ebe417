"""Two threads on the cores of a rank."""

from __future__ import annotations

import math

import pytest

from torchmn.errors import UsageError
from torchmn.exchange.auto.predict import Part, StepSimulation

CODE = Part(2.0, 2.0)
SEND = Part(4.0, 1.0)


def seconds(compute_s: float, part: Part, num_cores: float = 1.0) -> float:
    """An exchange beside a computation, then the wait for it."""
    simulation = StepSimulation(num_cores)
    simulation.start(0, [part])
    simulation.compute(compute_s)
    simulation.wait(0)
    return simulation.now_s


@pytest.mark.parametrize(("num_cores", "expected_s"), [(2.0, 6.0), (1.0, 8.0), (0.5, 16.0)])
def test_computation_of_both_threads_shares_the_cores(num_cores: float, expected_s: float) -> None:
    assert seconds(6.0, CODE, num_cores) == pytest.approx(expected_s)


def test_a_transfer_delays_by_what_it_needs_of_the_core() -> None:
    assert seconds(6.0, SEND) == pytest.approx(7.0)
    assert seconds(1.0, SEND) == pytest.approx(4.0)
    # the core is as busy as the link is with two ranks on it
    assert seconds(6.0, SEND, num_cores=0.5) == pytest.approx(14.0)


def test_exchanges_are_made_one_after_another() -> None:
    simulation = StepSimulation()
    simulation.start(0, [SEND])
    simulation.start(1, [SEND])
    simulation.wait(1)
    assert simulation.now_s == pytest.approx(8.0)
    simulation.wait(0)
    assert simulation.now_s == pytest.approx(8.0)


@pytest.mark.parametrize("seconds", [math.inf, math.nan])
def test_times_without_an_end_are_refused(seconds: float) -> None:
    for endless in (lambda: Part(seconds, 0.0), lambda: StepSimulation().compute(seconds)):
        with pytest.raises(UsageError, match="All facts must be finite"):
            endless()


def test_what_was_never_started_is_not_waited_for() -> None:
    simulation = StepSimulation()
    simulation.wait(7)
    simulation.compute(1.0)
    simulation.compute(-1.0)
    assert simulation.now_s == pytest.approx(1.0)
