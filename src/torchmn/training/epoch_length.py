"""Triggers of pytorch-pfn-extras for epochs of different lengths.

Its triggers know an epoch as a fixed number of iterations and compute ``iteration % (length *
period) < 1`` or ``int(point * length) == iteration``. With an iterator that wraps, epochs take 79,
78, 78, 78 iterations. `EpochLength` is the number that a manager gives them instead: it answers
both questions by what the updater's epoch has just passed, as Chainer's triggers did (ancestors
3.1), so that every trigger inside any extension is right.
"""

from __future__ import annotations

import math
from typing import Protocol

_ROUNDING = 1e-9  # epochs; 3 x 0.1 is not 0.3, and no data set has so many batches


class EpochCount(Protocol):
    """Where training is, in epochs with their fraction, now and one iteration before."""

    @property
    def iteration(self) -> int:
        """Iterations done."""

    @property
    def epoch_detail(self) -> float:
        """Now."""

    @property
    def previous_epoch_detail(self) -> float | None:
        """Before the last iteration; None before the first."""


class EpochLength(float):
    """The ``_iters_per_epoch`` of a manager whose epochs are those of ``count``.

    A subclass of float, so that ``2.5 * length`` asks it before it asks 2.5.
    """

    _count: EpochCount

    def __new__(cls, count: EpochCount) -> EpochLength:
        """See the class."""
        length = super().__new__(cls, 1.0)
        length._count = count
        return length

    def __mul__(self, periods: float) -> _Periods:
        return _Periods(self._count, periods)

    __rmul__ = __mul__


class _Periods(float):
    """``length * periods``: a number of epochs that knows whether training has just passed it."""

    _count: EpochCount

    def __new__(cls, count: EpochCount, periods: float) -> _Periods:
        periods_as_number = super().__new__(cls, periods)
        periods_as_number._count = count
        return periods_as_number

    def __rmod__(self, iteration: float) -> int:  # type: ignore[misc]
        """0 where a multiple of the period was passed in the last iteration, else 1."""
        before, now = (math.floor(x / float(self) + _ROUNDING) for x in self._interval())
        return 0 if before != now else 1

    def __int__(self) -> int:
        """The current iteration if this point was passed in it, else none."""
        before, now = self._interval()
        is_passed = before + _ROUNDING < float(self) <= now + _ROUNDING
        return self._count.iteration if is_passed else -1

    __trunc__ = __int__

    def _interval(self) -> tuple[float, float]:
        before = self._count.previous_epoch_detail
        return (0.0 if before is None else before, self._count.epoch_detail)
