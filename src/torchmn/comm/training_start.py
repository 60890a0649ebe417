"""The start of training and the number of steps, for `seed_ranks` and for loaders.

The start of training is a property of the process, like its random generators, whatever
communicators it has. Steps are counted together for a communicator and all those split from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary


class TrainingStart:
    """Calls ``function`` when training begins, and again at each later step. Local."""

    function: Callable[[], None] | None = None

    def begin(self) -> None:
        """Report that training begins, or continues."""
        if self.function is not None:
            self.function()


training_start = TrainingStart()
"""The `TrainingStart` of this process."""


@dataclass(slots=True)
class TrainingSteps:
    """The number of steps of multi-node optimizers; None before there is an optimizer.

    Data loaders use it to tell training from evaluation.
    """

    count: int | None = None

    def expect(self) -> None:
        """Start to count, because an optimizer has been created."""
        self.count = self.count or 0


# Weak, so that counts do not keep communicators alive.
_steps: WeakKeyDictionary[object, TrainingSteps] = WeakKeyDictionary()


def training_steps(comm: object) -> TrainingSteps:
    """The steps of a communicator. Local."""
    return _steps.setdefault(comm, TrainingSteps())


def share_training_steps(whole: object, part: object) -> None:
    """Let a communicator and one split from it share one count of steps. Local."""
    _steps[part] = training_steps(whole)
