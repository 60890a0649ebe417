"""Profile some steps with torch's profiler, and write torchmn's events to the same file.

The trace of torch has its own clock. One event whose time is known on both clocks, `CLOCK_EVENT`,
gives the difference; `torchmn.record.merged_trace` merges the ranks' files.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from torchmn.base.errors import UsageError
from torchmn.base.log import Log
from torchmn.base.private_files import make_private_folder
from torchmn.base.torch_private import is_profiler_running
from torchmn.record.profile_request import ProfileRequest
from torchmn.record.records import ClockOffset, Phase
from torchmn.record.step_recorder import StepRecorder
from torchmn.record.timeline import Exchange, Mark

_log = Log(__name__)
CLOCK_EVENT = "torchmn clock"
KEY = "torchmn"  # of our part of the file


@dataclass(eq=False)
class StepTrace:
    """One profile of this rank, from `begin` to `end`. For the training thread only."""

    _recorder: StepRecorder
    _recent: Callable[[], list[dict[str, Any]]]  # the last collectives that have ended
    path: Path
    _rank: int
    _offset: Callable[[], ClockOffset | None]

    def __post_init__(self) -> None:
        self._profiler: profile | None = None
        self._events: list[dict[str, Any]] = []
        self._last_number = 0

    @property
    def is_running(self) -> bool:
        """Whether the profile has begun and not ended."""
        return self._profiler is not None

    def begin(self) -> None:
        """Begin to profile. Raises UsageError: torch's profiler runs already."""
        if is_profiler_running():
            raise UsageError(
                "torch's profiler runs already in this process, and a second one would end it. "
                "Profile with one of torch.profiler, torchmn.record.trace() and torchmn run "
                "--profile at a time."
            )
        activities = [ProfilerActivity.CPU]
        if not self._recorder.clock.is_host:
            activities.append(ProfilerActivity.CUDA)
        self._last_number = max((row["number"] for row in self._recent()), default=0)
        self._profiler = profile(activities=activities)
        self._profiler.start()
        # Both clocks are read at once: what runs between them would shift the whole trace.
        self._clock_s = time.perf_counter()
        with record_function(CLOCK_EVENT):
            pass
        self._recorder.traces.append(self)

    def add_step(
        self,
        number: int,
        marks: Sequence[tuple[Mark, Phase]],
        end: Mark,
        exchanges: Sequence[Exchange],
    ) -> None:
        """Add a step that has ended, with the marks of its phases. Called by the recorder."""
        if not self._recorder.clock.is_host:  # the profiler itself sees what the GPU does
            self._add_collectives()
            return
        ends = [mark for mark, _ in marks[1:]] + [end]
        for (mark, phase), after in zip(marks, ends, strict=True):
            self._add("phases", phase, mark, after, {"step": number})
        for exchange in exchanges:
            arguments = {
                "step": number,
                "nbytes": exchange.nbytes,
                "sent_nbytes": exchange.sent_nbytes,
                "waited_ms": 1e3 * (exchange.started - exchange.ready),
                "encode_ms": 1e3 * exchange.coding_s(self._recorder.clock, "encode"),
                "decode_ms": 1e3 * exchange.coding_s(self._recorder.clock, "decode"),
            }
            name = f"bucket {exchange.number}"
            self._add("exchanges", name, exchange.started, exchange.ended, arguments)
        self._add_collectives()

    def _add_collectives(self) -> None:
        for row in self._recent():
            if row["number"] > self._last_number:
                self._last_number = row["number"]
                begin_s, end_s = row.pop("started_s"), row.pop("ended_s")
                self._add("collectives", row["name"], begin_s, end_s, row)

    def _add(
        self, track: str, name: str, begin_s: float, end_s: float, arguments: dict[str, Any]
    ) -> None:
        event = {"track": track, "name": name, "at_s": begin_s, "seconds": end_s - begin_s}
        self._events.append({**event, "args": arguments})

    def end(self) -> None:
        """End the profile and write it. Raises OSError or RuntimeError: it cannot be written."""
        running_profile, self._profiler = self._profiler, None
        if running_profile is None:
            return
        self._recorder.traces.remove(self)
        offset = self._offset()
        # torch writes the file, of which metadata is the only part that others may add to, as long
        # as the profiler runs.
        own = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "clock_s": self._clock_s,
            "offset_s": 0.0 if offset is None else offset.offset_s,
            "error_s": None if offset is None else offset.error_s,
            "events": self._events,
        }
        running_profile.add_metadata_json(KEY, json.dumps(own))
        running_profile.stop()
        self._events = []
        make_private_folder(self.path.parent)
        # Renamed at the end, so that nobody merges a file that is half written.
        unfinished = self.path.with_suffix(".unfinished")
        running_profile.export_chrome_trace(str(unfinished))
        unfinished.chmod(0o600)  # torch makes the file, with the mode of the user's umask
        unfinished.rename(self.path)


class RequestedTrace:
    """Begins and ends a profile at the steps that ``torchmn run --profile`` names."""

    def __init__(self, request: ProfileRequest, trace: StepTrace) -> None:
        self._request, self._trace = request, trace
        self._last_step: int | None = None
        self._is_over = self._had_to_wait = False
        if request.first == 0:
            self._begin()

    def step_begins(self, number: int) -> None:
        """Begin or end the profile before step ``number``. Called by the recorder."""
        self._last_step = number - 1
        if self._trace.is_running:
            if number >= self._request.last:
                self._end()
        elif not self._is_over and self._request.first <= number < self._request.last:
            self._begin()

    def close(self) -> None:
        """End the profile with the script, or say why there is none."""
        if self._trace.is_running:
            self._end()
        elif not self._is_over:
            last = "no step" if self._last_step is None else f"its last step was {self._last_step}"
            why = f"this rank has not reached these steps ({last})"
            if self._had_to_wait:
                why = (
                    "a profiler of the script ran in these steps, and there can be only one at a "
                    "time. Remove it, or choose other steps"
                )
            _log.warning("--profile %d:%d: %s.", self._request.first, self._request.last, why)

    def _begin(self) -> None:
        """Begin, unless a profiler of the script runs: then it is tried again at the next step."""
        self._had_to_wait = is_profiler_running()
        if not self._had_to_wait:
            self._trace.begin()

    def _end(self) -> None:
        self._is_over = True
        try:
            self._trace.end()
        except (OSError, RuntimeError) as error:
            _log.warning("the profile cannot be written: %s", error)


@contextmanager
def running(trace: StepTrace) -> Iterator[Path]:
    """Profile the ``with`` block; yields the path of the file."""
    trace.begin()
    try:
        yield trace.path
    finally:
        trace.end()
