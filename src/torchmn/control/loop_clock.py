"""The clock of a process that waits for others: time in which it was stopped does not count."""

from __future__ import annotations

import time

_MAX_TICK_S = 1.0


class LoopClock:
    """Monotonic seconds, advanced by `tick` in every turn of a loop, by at most a second.

    A process that was stopped, or whose machine was suspended, has not seen what others sent in the
    meantime: they must not be late by its own pause.
    """

    def __init__(self) -> None:
        self.now = self._ticked_at = time.monotonic()

    def tick(self) -> float:
        """Advance the clock; the new time."""
        before, self._ticked_at = self._ticked_at, time.monotonic()
        self.now += min(self._ticked_at - before, _MAX_TICK_S)
        return self.now
