"""Triggers that follow the epochs of an updater, whatever their lengths.

The triggers of pytorch-pfn-extras count an epoch as a fixed number of iterations. With an iterator
that wraps, epochs take 79, 78, 78, 78 iterations; these triggers fire in the iteration in which the
updater passes a point, as Chainer's did.
"""

from __future__ import annotations

import math
from typing import Any

from pytorch_pfn_extras.training.extension import Extension
from pytorch_pfn_extras.training.trigger import Trigger  # type: ignore[attr-defined]
from pytorch_pfn_extras.training.triggers.interval_trigger import IntervalTrigger
from pytorch_pfn_extras.training.triggers.manual_schedule_trigger import ManualScheduleTrigger

_ROUNDING = 1e-9  # epochs; 3 x 0.1 is not 0.3, and no data set has that many batches


class _EpochInterval(IntervalTrigger):
    def __call__(self, manager: Any) -> bool:
        before, now = (math.floor(x / self.period + _ROUNDING) for x in _last_iteration(manager))
        return before != now

    def may_fire(self, iteration: int, epoch_length: int) -> bool:
        return True


class _EpochSchedule(ManualScheduleTrigger):
    points: Any

    def __call__(self, manager: Any) -> bool:
        before, now = _last_iteration(manager)
        return any(before + _ROUNDING < point <= now + _ROUNDING for point in self.points)

    def may_fire(self, iteration: int, epoch_length: int) -> bool:
        return True


def follow_epochs(target: Any) -> Any:
    """A trigger or extension with its epoch triggers replaced, also those inside others."""
    if type(target) is IntervalTrigger and target.unit == "epoch":
        return _EpochInterval(target.period, "epoch")
    if type(target) is ManualScheduleTrigger and target.unit == "epoch":
        points: Any = target.points
        return _EpochSchedule(points, "epoch")
    for name, value in list(getattr(target, "__dict__", {}).items()):
        if isinstance(value, (Trigger, Extension)):
            setattr(target, name, follow_epochs(value))
    return target


def _last_iteration(manager: Any) -> tuple[float, float]:
    """Where the last iteration began and ended, in epochs."""
    before = manager.updater.previous_epoch_detail
    return (0.0 if before is None else before, manager.updater.epoch_detail)
