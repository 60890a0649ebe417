"""How long processes have been stopped by a signal, as far as one that watches them has seen."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


class StoppedProcesses(Generic[P]):
    """The processes that are stopped, each since it was first seen so.

    ``now`` is always of one `LoopClock`.

    >>> stopped = StoppedProcesses[int]()
    >>> stopped.update([7, 8], now=0.0)
    >>> stopped.update([8], now=5.0)
    >>> stopped.update([7, 8], now=6.0)
    >>> stopped.for_longer_than(3.0, now=6.0)
    [8]
    """

    def __init__(self) -> None:
        self._since: dict[P, float] = {}

    def __iter__(self) -> Iterator[P]:
        return iter(self._since)

    def update(self, stopped: Iterable[P], now: float) -> None:
        """Record which are stopped now; the others have continued or ended."""
        self._since = {process: self._since.get(process, now) for process in stopped}

    def for_longer_than(self, limit_s: float, now: float) -> list[P]:
        """Those that have been stopped all the time for at least ``limit_s``."""
        return [process for process, since in self._since.items() if now - since >= limit_s]
