"""Schedules: positions in samples or sweeps, units, and values that are refused."""

import math
from typing import Any

import pytest

import torchmn.cntk as C
from torchmn.errors import TorchmnWarning, UsageError


def test_momentum() -> None:
    time = C.momentum_as_time_constant_schedule([0, 600], epoch_size=10)
    assert time[0] == 0
    assert time.decay(time[10], 600) == pytest.approx(math.exp(-1))
    per_minibatch = C.momentum_schedule(0.9)
    assert per_minibatch.decay(0.9, 7) == 0.9
    of_eight = C.momentum_schedule(0.9, minibatch_size=8)
    assert of_eight.decay(0.9, 4) == pytest.approx(0.9**0.5)
    assert C.momentum_schedule_per_sample(0.9).decay(0.9, 2) == pytest.approx(0.81)


def test_rates() -> None:
    assert C.learning_rate_schedule(0.5, C.UnitType.sample).per_sample(0.5, 4) == 0.5
    assert C.learning_rate_schedule(0.5, C.UnitType.minibatch).per_sample(0.5, 4) == 0.125
    assert C.learning_parameter_schedule(0.5, 10).per_sample(0.5, 4) == 0.05
    assert C.learning_parameter_schedule_per_sample(0.5).minibatch_size == 1
    schedule = C.learning_parameter_schedule(0.5, 10)
    assert C.learning_parameter_schedule(schedule, 3) is schedule


def test_minibatch_sizes() -> None:
    sizes = C.minibatch_size_schedule([32, 64], epoch_size=1000)
    assert [sizes[n] for n in (0, 999, 1000)] == [32, 32, 64]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: C.learning_rate_schedule(-1.0, C.UnitType.sample), "learning rate -1"),
        (lambda: C.learning_rate_schedule(math.nan, C.UnitType.sample), "learning rate nan"),
        (lambda: C.learning_rate_schedule([], C.UnitType.sample), "without values"),
        (lambda: C.learning_rate_schedule([0.1], C.UnitType.sample, 0), "epoch_size=0"),
        (lambda: C.learning_parameter_schedule(0.1, -3), "minibatch_size=-3"),
        (lambda: C.momentum_schedule(1.5), "momentum 1.5 .* at most 1"),
        (lambda: C.momentum_as_time_constant_schedule(-5), "time constant -5"),
        (lambda: C.minibatch_size_schedule(0), "minibatch size 0 .* at least 1"),
        (lambda: C.learning_rate_schedule([(1, 2, 3)], C.UnitType.sample), r"\(1, 2, 3\)"),
    ],
)
def test_values_that_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_an_epoch_size_without_a_list() -> None:
    with pytest.warns(TorchmnWarning, match="epoch_size=100 has no effect"):
        C.learning_rate_schedule(0.1, C.UnitType.sample, 100)
