"""Values that change during training, in CNTK's units.

A schedule is a value for each position in the training: the samples seen so far divided by
``epoch_size``, or the sweeps over the data. What the value means for a minibatch of N samples is
given by its ``minibatch_size`` M, CNTK's *reference minibatch size*:

    learning rate r:  r / M for the sum of the gradients of the samples;  M = IGNORE: r / N
    momentum m:       m ** (N / M);                                       M = IGNORE: m

so that M = 1 is CNTK's `UnitType.sample` and IGNORE its `UnitType.minibatch`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from torchmn.base.errors import UsageError
from torchmn.base.warn import warn

__all__ = [
    "IGNORE",
    "Schedule",
    "UnitType",
    "learning_parameter_schedule",
    "learning_parameter_schedule_per_sample",
    "learning_rate_schedule",
    "minibatch_size_schedule",
    "momentum_as_time_constant_schedule",
    "momentum_schedule",
    "momentum_schedule_per_sample",
    "training_parameter_schedule",
]

IGNORE = 0
"""A value is for a whole minibatch, whatever its size."""

# One value; one for each epoch; or pairs (epochs, value). The last one stays.
Values = float | Sequence[float] | Sequence[tuple[int, float]]


class UnitType(Enum):
    """The unit of a learning rate: one sample, or a minibatch of any size.

    >>> from torchmn import cntk
    >>> [unit.name for unit in cntk.UnitType]
    ['sample', 'minibatch']
    """

    sample = "sample"
    minibatch = "minibatch"


@dataclass(frozen=True)
class Schedule:
    """A value for each position of a training. Made by the functions of this module.

    Args:
        spans: pairs (epochs, value), the last of which holds for ever.
        epoch_size: samples over all workers in an epoch; None: an epoch is a sweep over the data.
        minibatch_size: the number of samples that the value is for, or `IGNORE`.

    ``schedule[n]`` is the value after n samples, or n sweeps where ``epoch_size`` is None.

    >>> from torchmn import cntk
    >>> schedule = cntk.learning_parameter_schedule([0.1, 0.01], epoch_size=1000)
    >>> schedule.value(999, 0), schedule.value(1000, 0)
    (0.1, 0.01)
    """

    spans: tuple[tuple[int, float], ...]
    epoch_size: int | None = None
    minibatch_size: int = IGNORE

    def __getitem__(self, position: float) -> float:
        left = position / (1 if self.epoch_size is None else self.epoch_size)
        for num_epochs, value in self.spans[:-1]:
            if left < num_epochs:
                return value
            left -= num_epochs
        return self.spans[-1][1]

    def value(self, num_samples_seen: float, num_sweeps: float) -> float:
        """After this many samples over all workers, in this many sweeps."""
        return self[num_sweeps if self.epoch_size is None else num_samples_seen]

    def per_sample(self, value: float, num_samples: float) -> float:
        """The rate for the sum of the gradients of a minibatch of ``num_samples``."""
        return value / (self.minibatch_size or num_samples)

    def decay(self, value: float, num_samples: float) -> float:
        """The factor by which an average decays in a minibatch of ``num_samples``."""
        if self.minibatch_size == IGNORE:
            return value
        return float(value ** (num_samples / self.minibatch_size))


def training_parameter_schedule(
    schedule: Values | Schedule, unit: UnitType, epoch_size: int | None = None
) -> Schedule:
    """A schedule of values per sample or per minibatch.

    Args:
        schedule: one value; a list with a value for each epoch; or a list of pairs (epochs, value).
            The last value stays.
        unit: what a value is for.
        epoch_size: samples over all workers in an epoch; None: a sweep over the data.

    Raises UsageError: there is no value, or a value or number of epochs is out of range.

    Example:
        >>> rates = training_parameter_schedule([(2, 0.1), (1, 0.01)], UnitType.sample, 100)
        >>> rates[0], rates[199], rates[200], rates[5000]
        (0.1, 0.1, 0.01, 0.01)
    """
    unit = UnitType(unit)
    return _schedule(schedule, epoch_size, 1 if unit is UnitType.sample else IGNORE)


def learning_rate_schedule(
    lr: Values | Schedule, unit: UnitType, epoch_size: int | None = None
) -> Schedule:
    """Learning rates per sample or per minibatch; see `training_parameter_schedule`.

    Raises UsageError: a rate is negative, or as `training_parameter_schedule`.

    Example:
        >>> learning_rate_schedule([0.1, 0.01], UnitType.minibatch, epoch_size=100)[150]
        0.01
    """
    made = training_parameter_schedule(lr, unit, epoch_size)
    return _checked(made, "learning rate", 0, math.inf)


def learning_parameter_schedule(
    schedule: Values | Schedule, minibatch_size: int | None = None, epoch_size: int | None = None
) -> Schedule:
    """Values for minibatches of ``minibatch_size`` samples, as CNTK 2.2 and later have them.

    By default (`IGNORE`) they are for minibatches of any size. Raises as
    `training_parameter_schedule`.

    Example:
        >>> learning_parameter_schedule(0.1, minibatch_size=32).per_sample(0.1, 64)
        0.003125
    """
    return _schedule(schedule, epoch_size, IGNORE if minibatch_size is None else minibatch_size)


def learning_parameter_schedule_per_sample(
    schedule: Values | Schedule, epoch_size: int | None = None
) -> Schedule:
    """Values per sample. Raises as `training_parameter_schedule`.

    Example:
        >>> learning_parameter_schedule_per_sample(0.1).per_sample(0.1, 64)
        0.1
    """
    return _schedule(schedule, epoch_size, 1)


def momentum_schedule(
    momentum: Values | Schedule, epoch_size: int | None = None, minibatch_size: int | None = None
) -> Schedule:
    """Momentum per minibatch, of any size or of ``minibatch_size`` samples.

    Raises UsageError: a momentum is below 0 or above 1, or as `training_parameter_schedule`.

    Example:
        >>> momentum_schedule(0.9)[0]
        0.9
    """
    made = learning_parameter_schedule(momentum, minibatch_size, epoch_size)
    return _checked(made, "momentum", 0, 1)


def momentum_schedule_per_sample(
    momentum: Values | Schedule, epoch_size: int | None = None
) -> Schedule:
    """Momentum per sample. Raises as `momentum_schedule`.

    Example:
        >>> momentum_schedule_per_sample(0.999)[0]
        0.999
    """
    return momentum_schedule(momentum, epoch_size, 1)


def momentum_as_time_constant_schedule(
    momentum: Values | Schedule, epoch_size: int | None = None
) -> Schedule:
    """Momentum by the number of samples after which 1/e of a gradient is left; 0: no momentum.

    Under `block_momentum_distributed_learner` these are samples of one rank, else of all. Raises
    UsageError: a time constant is negative, or as `training_parameter_schedule`.

    Example:
        >>> momentum_as_time_constant_schedule([0, 600], epoch_size=100)[0]
        0.0
    """
    if isinstance(momentum, Schedule):
        return momentum
    made = _checked(_schedule(momentum, epoch_size, 1), "time constant", 0, math.inf)
    spans = tuple((n, math.exp(-1 / value) if value else 0.0) for n, value in made.spans)
    return Schedule(spans, made.epoch_size, 1)


def minibatch_size_schedule(schedule: Values | Schedule, epoch_size: int | None = 1) -> Schedule:
    """Sizes of global minibatches, in samples; see `training_parameter_schedule`.

    Raises UsageError: a size is below 1, or as `training_parameter_schedule`.

    Example:
        >>> minibatch_size_schedule([(2, 32), (1, 64)], epoch_size=100)[250]
        64.0
    """
    return _checked(_schedule(schedule, epoch_size, IGNORE), "minibatch size", 1, math.inf)


def _schedule(values: Values | Schedule, epoch_size: int | None, minibatch_size: int) -> Schedule:
    if isinstance(values, Schedule):
        return values
    if epoch_size is not None and not (isinstance(epoch_size, int) and epoch_size >= 1):
        raise UsageError(
            f"epoch_size={epoch_size!r} must be a number of samples, at least 1, or None for "
            "sweeps over the data."
        )
    if not (isinstance(minibatch_size, int) and minibatch_size >= 0):
        raise UsageError(
            f"minibatch_size={minibatch_size!r} must be a number of samples, or IGNORE (0)."
        )
    if isinstance(values, (int, float, np.number)):
        if epoch_size not in (None, 1):
            warn(
                f"epoch_size={epoch_size} has no effect: the schedule is one number, {values}. "
                "Give a list of values.",
            )
        return Schedule(((1, float(values)),), None, minibatch_size)
    spans = tuple(_span(each) for each in values)
    if not spans:
        raise UsageError("A schedule without values. Give a number or a list of numbers.")
    return Schedule(spans, epoch_size, minibatch_size)


def _span(each: float | tuple[int, float]) -> tuple[int, float]:
    if isinstance(each, (int, float, np.number)):
        return 1, float(each)
    if len(each) != 2 or each[0] < 0:
        raise UsageError(
            f"{each!r} in a schedule must be a value, or a pair (number of epochs, value)."
        )
    return int(each[0]), float(each[1])


def _checked(schedule: Schedule, what: str, low: float, high: float) -> Schedule:
    for _, value in schedule.spans:
        if not (low <= value <= high and math.isfinite(value)):
            limits = f"at least {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
            raise UsageError(f"The {what} {value:g} must be finite, {limits}.")
    return schedule
