"""The moment at which training begins in this process, for what waits for it: `seed_ranks`.

Random generators belong to the process, and so does this moment, whatever communicators it has.
"""

from __future__ import annotations

from collections.abc import Callable


class TrainingStart:
    """Calls one function when training begins. Local."""

    def __init__(self) -> None:
        self._function: Callable[[], None] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether a function will be called."""
        return self._function is not None

    def wait(self, function: Callable[[], None] | None) -> None:
        """Call ``function()``, in place of another one, when training begins; None: nothing."""
        self._function = function

    def begin(self) -> None:
        """Training begins, if it has not begun before."""
        function, self._function = self._function, None
        if function is not None:
            function()


training_start = TrainingStart()
"""Of this process."""
