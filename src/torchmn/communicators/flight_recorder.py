"""The record of collectives: what every rank was doing, in a ring buffer that an observer can read.

Every collective of every transport is numbered and recorded here before it starts. An observer (a
watchdog thread, an error message, the report of a hang) reads `entries()` at any time, from any
thread; writing takes no lock, because the engine lets one collective run at a time.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torchmn.control.messages import CollectiveStatus
from torchmn.monitor import script_monitor

State = Literal["running", "done", "failed", "late"]

_ALIKE = {"all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "split"}
"""To these all ranks come with tensors of the same shape."""


@dataclass(slots=True)
class CollectiveRecord:
    """One collective on this rank. ``shape`` and ``dtype`` describe the local tensor.

    ``number`` counts the collectives of this rank, ``in_group`` those of the group, which all of
    its ranks count alike.
    """

    number: int
    group: str
    in_group: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int | None
    step: int | None
    started_s: float
    limit_s: float
    state: State = "running"
    ended_s: float | None = None

    @property
    def intention(self) -> str:
        """What is the same on all ranks of the group: the name, mostly with dtype and shape."""
        return (
            f"{self.name} of {self.dtype}{list(self.shape)}" if self.name in _ALIKE else self.name
        )

    @property
    def place(self) -> str:
        """Bucket and step in words; empty where there are none."""
        return f"bucket {self.bucket}, step {self.step}" if self.bucket is not None else ""

    def __str__(self) -> str:
        where = f"{self.place}, " if self.place else ""
        shape = f"shape {self.shape}, {self.dtype}"
        return f"{self.name} #{self.number} of group '{self.group}' ({where}{shape})"


class FlightRecorder:
    """The last ``capacity`` collectives of one communicator and everything split from it. Local."""

    def __init__(self, capacity: int = 512, *, job_ranks: Sequence[int] = ()) -> None:
        self.job_ranks = tuple(job_ranks)
        """What the communicator's ranks are called in the job."""
        self._members: dict[str, tuple[int, ...]] = {}
        self._entries: deque[CollectiveRecord] = deque(maxlen=capacity)
        self._last_of: dict[str, CollectiveRecord] = {}
        self._number = 0
        self._in_group: Counter[str] = Counter()
        self._bucket: int | None = None
        self._step: int | None = None
        self._first_step: int | None = None
        self.has_stepped = False
        """Whether the first step's sums are over: from then on ranks keep the same pace."""

    def begin(
        self,
        group: str,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        limit_s: float = math.inf,
    ) -> CollectiveRecord:
        """Number and record a collective that is about to start."""
        self._number += 1
        self._in_group[group] += 1
        entry = CollectiveRecord(
            self._number,
            group,
            self._in_group[group],
            name,
            shape,
            dtype,
            self._bucket,
            self._step,
            time.monotonic(),
            limit_s,
        )
        self._entries.append(entry)
        self._last_of[group] = entry
        return entry

    def end(self, entry: CollectiveRecord, state: State) -> None:
        """Record how it ended."""
        entry.ended_s = time.monotonic()
        entry.state = state
        if state == "late":
            # Before the error is raised: a script that catches it may end at once, and whether the
            # job has failed would depend on who is faster.
            script_monitor.look_for_hang()

    @contextmanager
    def label(self, *, bucket: int | None = None, step: int | None = None) -> Iterator[None]:
        """Name the bucket and the step that the collectives inside belong to."""
        before = self._bucket, self._step
        self._bucket, self._step = bucket, step
        if step is not None and self._first_step is None:
            self._first_step = step
        self.has_stepped = self.has_stepped or step not in (None, self._first_step)
        try:
            yield
        finally:
            self._bucket, self._step = before

    def entries(self) -> list[CollectiveRecord]:
        """The recorded collectives, oldest first; a snapshot, safe from any thread."""
        return list(self._entries.copy())

    def know(self, group: str, ranks: Sequence[int]) -> None:
        """Note which of the communicator's ranks a group has; else it has all."""
        self._members[group] = tuple(ranks)

    def overdue(self) -> CollectiveRecord | None:
        """A collective that has not completed within its limit. From any thread."""
        now = time.monotonic()
        for entry in self._last_of.copy().values():
            is_running_late = entry.state == "running" and now - entry.started_s >= entry.limit_s
            if entry.state == "late" or is_running_late:
                return entry
        return None

    def describe(self) -> list[CollectiveStatus]:
        """The newest collective of each group, for a report. From any thread."""
        now = time.monotonic()
        found = []
        for entry in self._last_of.copy().values():
            members = self._members.get(entry.group, range(len(self.job_ranks)))
            found.append(
                CollectiveStatus(
                    group=entry.group,
                    ranks=tuple(self.job_ranks[rank] for rank in members),
                    number=entry.in_group,
                    what=entry.intention,
                    where=entry.place,
                    state=entry.state,
                    age_s=round(now - entry.started_s, 1),
                )
            )
        return found

    @property
    def last(self) -> CollectiveRecord | None:
        """The newest collective, or None before the first."""
        return self._entries[-1] if self._entries else None
