"""The record of collectives: what every rank was doing, in a ring buffer that an observer can read.

Every collective of every transport is numbered and recorded here before it starts. An observer (a
watchdog thread, an error message, part 4's hang report) reads `entries()` at any time, from any
thread; writing takes no lock, because the engine lets one collective run at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

State = Literal["running", "done", "failed"]


@dataclass(slots=True)
class Entry:
    """One collective on this rank. ``shape`` and ``dtype`` describe the local tensor."""

    number: int
    group: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int | None
    step: int | None
    started_s: float
    state: State = "running"
    ended_s: float | None = None

    def __str__(self) -> str:
        where = f"bucket {self.bucket}, step {self.step}, " if self.bucket is not None else ""
        shape = f"shape {self.shape}, {self.dtype}"
        return f"{self.name} #{self.number} of group '{self.group}' ({where}{shape})"


class Journal:
    """The last ``capacity`` collectives of one communicator and everything split from it. Local."""

    def __init__(self, capacity: int = 512) -> None:
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self._number = 0
        self._bucket: int | None = None
        self._step: int | None = None

    def begin(self, group: str, name: str, shape: tuple[int, ...], dtype: str) -> Entry:
        """Number and record a collective that is about to start."""
        self._number += 1
        entry = Entry(
            self._number, group, name, shape, dtype, self._bucket, self._step, time.monotonic()
        )
        self._entries.append(entry)
        return entry

    def end(self, entry: Entry, state: State) -> None:
        """Record how it ended."""
        entry.ended_s = time.monotonic()
        entry.state = state

    @contextmanager
    def label(self, *, bucket: int | None = None, step: int | None = None) -> Iterator[None]:
        """Name the bucket and the step that the collectives inside belong to."""
        before = self._bucket, self._step
        self._bucket, self._step = bucket, step
        try:
            yield
        finally:
            self._bucket, self._step = before

    def entries(self) -> list[Entry]:
        """The recorded collectives, oldest first; a snapshot, safe from any thread."""
        return list(self._entries.copy())

    @property
    def last(self) -> Entry | None:
        """The newest collective, or None before the first."""
        return self._entries[-1] if self._entries else None
