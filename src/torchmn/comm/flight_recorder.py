"""The flight recorder: a ring buffer of a rank's last collectives, readable from any thread.

Every collective of every transport is numbered and recorded before it starts. The monitor, error
messages and hang reports read `entries()` at any time, from any thread. Writing needs no lock,
because the engine runs one collective at a time.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torchmn.base import events
from torchmn.control.messages import CollectiveStatus, EngineStatus

if TYPE_CHECKING:
    from torchmn.comm.waiting import PeerStatus, Wait

State = Literal["running", "done", "failed", "late"]

# Profiles use perf_counter(), whose zero may differ from that of monotonic(). Measured once, since
# each measurement is wrong by the time between the two calls.
_TO_PERF_COUNTER_S = time.perf_counter() - time.monotonic()

_SAME_SHAPE = {"all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "split"}
"""Collectives in which all ranks have tensors of the same shape."""


@dataclass(slots=True)
class CollectiveRecord:
    """One collective on this rank. ``shape`` and ``dtype`` describe the local tensor.

    ``number`` counts the collectives of this rank. ``in_group`` counts those of the group: all
    ranks of the group use the same number for the same collective. ``call`` names the call of the
    script, and its line, if known.
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
    call: str = ""

    @property
    def signature(self) -> str:
        """The name, with dtype and shape if they must be equal on all ranks of the group."""
        return (
            f"{self.name} of {self.dtype}{list(self.shape)}"
            if self.name in _SAME_SHAPE
            else self.name
        )

    @property
    def label(self) -> str:
        """Bucket and step as text; empty if the collective belongs to no bucket."""
        return f"bucket {self.bucket}, step {self.step}" if self.bucket is not None else ""

    def __str__(self) -> str:
        where = f"{self.label}, " if self.label else ""
        shape = f"shape {self.shape}, {self.dtype}"
        return f"{self.name} #{self.number} of group '{self.group}' ({where}{shape})"


class FlightRecorder:
    """The last ``capacity`` collectives of a communicator and the groups split from it. Local."""

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
        """The numbers in the job of the communicator's ranks, in rank order."""
        self._has_whole_job = has_whole_job
        self._members: dict[str, tuple[int, ...]] = {}
        # Other threads copy it without a lock, which a thread that hangs could hold: appending to a
        # deque and copying one are atomic.
        self._entries: deque[CollectiveRecord] = deque(maxlen=capacity)
        self._last_of: dict[str, CollectiveRecord] = {}
        self._unfinished: deque[CollectiveRecord] = deque()
        """Collectives that have not ended; several if they are queued on a device."""
        self._late: dict[str, CollectiveRecord] = {}
        """Collectives that exceeded their limit, by group, until the group's next one begins."""
        self._number = 0
        self._in_group: Counter[str] = Counter()
        self._bucket: int | None = None
        self._step: int | None = None
        self._first_step: int | None = None
        self.call = ""
        """The call of the script that the next collectives belong to; empty if it is not known."""
        self.has_stepped = False
        """Whether the sums of the first step are over. Ranks run at different speeds until then."""
        self.peers: PeerStatus | None = None
        """Asks the other ranks for their status; None if there is one limit for all waits."""
        self.look_at_engine: Callable[[tuple[int, ...]], EngineStatus] | None = None
        """Describes the engine that runs these collectives; None on other threads."""
        # Ranks may be threads: a recorder belongs to the rank on whose thread it is made.
        self._owner: threading.Thread | None = threading.current_thread()
        with self._making:
            self._made.add(self)
        for observer in events.observers:
            observer.collectives(self)

    @classmethod
    def made_in(cls, thread: threading.Thread) -> list[FlightRecorder]:
        """The recorders created on a thread: those of one rank. May be called from any thread."""
        # Ranks may be threads, so other threads can add to the set during this iteration.
        with cls._making:
            return [each for each in cls._made if each._owner is thread]

    def for_other_thread(self) -> FlightRecorder:
        """An empty recorder for the same ranks, for exchanges on other threads."""
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
        """Number and record a collective that is about to start. Returns its record."""
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
            call=self.call,
        )
        self._entries.append(entry)
        self._last_of[group] = entry
        self._unfinished.append(entry)
        self._late.pop(group, None)
        return entry

    def end(self, entry: CollectiveRecord, state: State) -> None:
        """Record that a collective ended, and how."""
        entry.ended_s = time.monotonic()
        entry.state, entry.wait = state, None
        if state == "late":
            self._late[entry.group] = entry
        self._unfinished.remove(entry)
        if state == "late":
            # Before the error is raised: a script that catches it may exit at once, and whether the
            # launcher learns of the late collective would depend on a race.
            for observer in events.observers:
                observer.collective(entry)

    def set_label(self, bucket: int | None, step: int | None) -> None:
        """Set the bucket and the step that the next collectives belong to."""
        self._bucket, self._step = bucket, step
        # Sums without a step, as of a broadcast, tell nothing about the first step.
        if step is not None and not self.has_stepped:
            self.has_stepped = self._first_step not in (None, step)
            self._first_step = step

    def entries(self) -> list[CollectiveRecord]:
        """The recorded collectives, oldest first; a snapshot, safe from any thread."""
        return list(self._entries.copy())

    def recent_collectives(self) -> list[dict[str, Any]]:
        """The last collectives that have ended, for a profile: what they sent, and when. Local."""
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
                "started_s": entry.started_s + _TO_PERF_COUNTER_S,
                "ended_s": entry.ended_s + _TO_PERF_COUNTER_S,
            }
            for entry in self.entries()
            if entry.ended_s is not None
        ]

    def register_group(self, group: str, ranks: Sequence[int]) -> None:
        """Register the ranks of a group. Groups that are not registered have all ranks."""
        self._members[group] = tuple(ranks)

    def members(self, group: str) -> tuple[int, ...]:
        """The ranks registered for a group; empty if it has all ranks."""
        return self._members.get(group, ())

    def running(self) -> list[CollectiveRecord]:
        """The current collective of each group that has not ended yet. From any thread."""
        return [each for each in self._current().values() if each.state == "running"]

    def _current(self) -> dict[str, CollectiveRecord]:
        """By group, the oldest collective that has not ended, or else the newest. Any thread."""
        # Copies, because the threads of the exchange and of the watcher change these meanwhile.
        oldest = {each.group: each for each in reversed(self._unfinished.copy())}
        return {**self._last_of.copy(), **oldest, **self._late.copy()}

    def overdue(self) -> CollectiveRecord | None:
        """A collective that exceeded its time limit, or None. From any thread."""
        now = time.monotonic()
        for entry in self._current().values():
            is_running_late = entry.state == "running" and now - entry.started_s >= entry.limit_s
            if entry.state == "late" or is_running_late:
                return entry
        return None

    def describe(self) -> list[CollectiveStatus]:
        """The current collective of each group, or its newest, for a report. From any thread."""
        return [self._status(entry) for entry in self._current().values()]

    def recent(self, count: int) -> list[CollectiveStatus]:
        """The last ``count`` collectives, the oldest first. From any thread."""
        return [self._status(entry) for entry in self.entries()[-count:]]

    def _status(self, entry: CollectiveRecord) -> CollectiveStatus:
        now = time.monotonic()
        return CollectiveStatus(
            group=entry.group,
            ranks=self._ranks_in_job(self._members.get(entry.group)),
            number=entry.in_group,
            what=entry.signature,
            where=entry.label,
            call=entry.call,
            state=entry.state,
            age_s=round(now - entry.started_s, 1),
            seconds=round((entry.ended_s or now) - entry.started_s, 6),
        )

    def _ranks_in_job(self, members: Sequence[int] | None) -> tuple[int, ...]:
        """Their numbers in the job; empty for all: every rank reports this, and it would be long.

        ``members`` is None for all ranks of the communicator.
        """
        if members is None:
            return () if self._has_whole_job else self.job_ranks
        return tuple(self.job_ranks[rank] for rank in members)

    def engine_status(self) -> EngineStatus | None:
        """What the engine runs and has queued, for `torchmn inspect`. From any thread."""
        look = self.look_at_engine
        return None if look is None else look(self._ranks_in_job(None))

    @property
    def last(self) -> CollectiveRecord | None:
        """The newest collective, or None before the first."""
        return self._entries[-1] if self._entries else None
