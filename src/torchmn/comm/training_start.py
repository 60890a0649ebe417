"""When training begins, and how many steps there were: for `seed_ranks` and for loaders.

Random generators belong to the process, and so does the beginning, whatever communicators it has.
Steps are counted for a communicator, what it was split from, and other parts of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary


class TrainingStart:
    """Calls a function when training begins, and at each step after that. Local."""

    function: Callable[[], None] | None = None

    def begin(self) -> None:
        """Training begins, or has begun before."""
        if self.function is not None:
            self.function()


training_start = TrainingStart()
"""Of this process."""


@dataclass(slots=True)
class TrainingSteps:
    """Steps of multi-node optimizers; None before there is an optimizer.

    By these data loading recognizes training.
    """

    count: int | None = None

    def expect(self) -> None:
        """There is an optimizer."""
        self.count = self.count or 0


_steps: WeakKeyDictionary[object, TrainingSteps] = WeakKeyDictionary()


def training_steps(comm: object) -> TrainingSteps:
    """Those of a communicator. Local."""
    return _steps.setdefault(comm, TrainingSteps())


def share_training_steps(whole: object, part: object) -> None:
    """Count the steps of a part of a communicator together with those of the whole."""
    _steps[part] = training_steps(whole)
