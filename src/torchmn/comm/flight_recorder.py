"""The flight recorder: the last collectives of a rank, in a ring buffer that any thread can read.

Every collective of every transport is numbered and recorded before it starts. The monitor, error
messages and hang reports read `entries()` at any time, from any thread. Writing takes no lock,
because the engine lets one collective run at a time.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torchmn.base import events
from torchmn.control.messages import CollectiveStatus

if TYPE_CHECKING:
    from torchmn.comm.waiting import PeerStatus, Wait

State = Literal["running", "done", "failed", "late"]

_SAME_SHAPE = {"all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "split"}
"""Collectives in which all ranks have tensors of the same shape."""


@dataclass(slots=True)
class CollectiveRecord:
    """One collective on this rank. ``shape`` and ``dtype`` describe the local tensor.

    ``number`` counts the collectives of this rank, ``in_group`` those of the group, in which the
    same number is the same collective on all of its ranks.
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
    wait: Wait | None = None

    @property
    def signature(self) -> str:
        """What is the same on all ranks of the group: the name, often with dtype and shape."""
        return (
            f"{self.name} of {self.dtype}{list(self.shape)}"
            if self.name in _SAME_SHAPE
            else self.name
        )

    @property
    def label(self) -> str:
        """Bucket and step as text; empty where there are none."""
        return f"bucket {self.bucket}, step {self.step}" if self.bucket is not None else ""

    def __str__(self) -> str:
        where = f"{self.label}, " if self.label else ""
        shape = f"shape {self.shape}, {self.dtype}"
        return f"{self.name} #{self.number} of group '{self.group}' ({where}{shape})"


class FlightRecorder:
    """The last ``capacity`` collectives of one communicator and everything split from it. Local."""

    _made: ClassVar[weakref.WeakSet[FlightRecorder]] = weakref.WeakSet()
    _making = threading.Lock()

    def __init__(
        self,
        capacity: int = 512,
        *,
        job_ranks: Sequence[int] = (),
        has_whole_job: bool = False,
        hosts: Sequence[str] = (),
    ) -> None:
        self._hosts = tuple(hosts)
        self.job_ranks = tuple(job_ranks)
        """The ranks of the job that the communicator's ranks are."""
        self._has_whole_job = has_whole_job
        self._members: dict[str, tuple[int, ...]] = {}
        self._entries: deque[CollectiveRecord] = deque(maxlen=capacity)
        self._last_of: dict[str, CollectiveRecord] = {}
        self._unfinished: deque[CollectiveRecord] = deque()
        """Several, where collectives are queued on a device."""
        self._late: dict[str, CollectiveRecord] = {}
        """Those that were late, by group, until the next one of the group begins."""
        self._number = 0
        self._in_group: Counter[str] = Counter()
        self._bucket: int | None = None
        self._step: int | None = None
        self._first_step: int | None = None
        self.has_stepped = False
        """Whether the sums of the first step are over: from then on ranks run at one speed."""
        self.peers: PeerStatus | None = None
        """Asks the other ranks what they do, where waits are longer if they work."""
        self._owner: threading.Thread | None = threading.current_thread()
        with self._making:
            self._made.add(self)
        for observer in events.observers:
            observer.collectives(self)

    @classmethod
    def made_in(cls, thread: threading.Thread) -> list[FlightRecorder]:
        """Those of all communicators of the rank whose thread this is. From any thread."""
        with cls._making:
            return [each for each in cls._made if each._owner is thread]

    def for_other_thread(self) -> FlightRecorder:
        """An empty one of the same ranks, for exchanges beside these."""
        other = FlightRecorder(
            job_ranks=self.job_ranks, has_whole_job=self._has_whole_job, hosts=self._hosts
        )
        other._owner = None
        return other

    def begin(
        self,
        group: str,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        limit_s: float = math.inf,
        wait: Wait | None = None,
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
            wait=wait,
        )
        self._entries.append(entry)
        self._last_of[group] = entry
        self._unfinished.append(entry)
        self._late.pop(group, None)
        return entry

    def end(self, entry: CollectiveRecord, state: State) -> None:
        """Record how it ended."""
        entry.ended_s = time.monotonic()
        entry.state, entry.wait = state, None
        if state == "late":
            self._late[entry.group] = entry
        self._unfinished.remove(entry)
        if state == "late":
            # Before the error is raised: a script that catches it may exit at once, and the result
            # of the job would depend on a race.
            for observer in events.observers:
                observer.collective(entry)

    def set_label(self, bucket: int | None, step: int | None) -> None:
        """Name the bucket and the step that the next collectives belong to."""
        self._bucket, self._step = bucket, step
        if step is not None and not self.has_stepped:
            self.has_stepped = self._first_step not in (None, step)
            self._first_step = step

    def entries(self) -> list[CollectiveRecord]:
        """The recorded collectives, oldest first; a snapshot, safe from any thread."""
        return list(self._entries.copy())

    def recent_collectives(self) -> list[dict[str, Any]]:
        """The last collectives that have ended, for a profile: what they moved, and when. Local."""
        to_own_clock_s = time.perf_counter() - time.monotonic()
        return [
            {
                "number": entry.number,
                "name": entry.name,
                "group": entry.group,
                "bucket": entry.bucket,
                "step": entry.step,
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "hosts": sorted(
                    {
                        self._hosts[rank]
                        for rank in self.members(entry.group) or range(len(self._hosts))
                    }
                ),
                "started_s": entry.started_s + to_own_clock_s,
                "ended_s": entry.ended_s + to_own_clock_s,
            }
            for entry in self.entries()
            if entry.ended_s is not None
        ]

    def register_group(self, group: str, ranks: Sequence[int]) -> None:
        """Register which ranks of the communicator a group has; otherwise it has all."""
        self._members[group] = tuple(ranks)

    def members(self, group: str) -> tuple[int, ...]:
        """The ranks that were registered for a group; none if it has all."""
        return self._members.get(group, ())

    def running(self) -> list[CollectiveRecord]:
        """What has not ended yet. From any thread."""
        return [each for each in self._current().values() if each.state == "running"]

    def _current(self) -> dict[str, CollectiveRecord]:
        """The collective of each group that is under way, or its newest. From any thread."""
        oldest = {each.group: each for each in reversed(self._unfinished.copy())}
        return {**self._last_of.copy(), **oldest, **self._late.copy()}

    def overdue(self) -> CollectiveRecord | None:
        """A collective that has not completed within its limit. From any thread."""
        now = time.monotonic()
        for entry in self._current().values():
            is_running_late = entry.state == "running" and now - entry.started_s >= entry.limit_s
            if entry.state == "late" or is_running_late:
                return entry
        return None

    def describe(self) -> list[CollectiveStatus]:
        """The collective of each group that is under way, or its newest, for a report.

        From any thread.
        """
        now = time.monotonic()
        newest = []
        for entry in self._current().values():
            members = self._members.get(entry.group, range(len(self.job_ranks)))
            if self._has_whole_job and entry.group not in self._members:
                members = ()  # all: every rank reports this, and a list of all would be long
            newest.append(
                CollectiveStatus(
                    group=entry.group,
                    ranks=tuple(self.job_ranks[rank] for rank in members),
                    number=entry.in_group,
                    what=entry.signature,
                    where=entry.label,
                    state=entry.state,
                    age_s=round(now - entry.started_s, 1),
                )
            )
        return newest

    @property
    def last(self) -> CollectiveRecord | None:
        """The newest collective, or None before the first."""
        return self._entries[-1] if self._entries else None
