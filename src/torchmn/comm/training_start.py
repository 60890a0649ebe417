"""The moment at which training begins in this process, for who waits for it: `seed_ranks`.

Random generators belong to the process, and so does this moment, whatever communicators it has.
"""

from __future__ import annotations

from collections.abc import Callable


class TrainingStart:
    """Calls a function when training begins, and at each step after that. Local."""

    function: Callable[[], None] | None = None

    def begin(self) -> None:
        """Training begins, or has begun before."""
        if self.function is not None:
            self.function()


training_start = TrainingStart()
"""Of this process."""
