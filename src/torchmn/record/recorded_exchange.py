"""One sum of gradients in the record of a step: when it was ready, ran and ended, what it sent."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from torchmn.record.records import Bucket, Phase
from torchmn.record.timeline import Mark, StepClock

if TYPE_CHECKING:
    from torchmn.record.step_recorder import StepRecorder

DIGITS = 7
"""Of seconds in the record: tenths of microseconds."""


class Traffic(Protocol):
    """The communicator, whose bytes are counted."""

    def traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes sent and received since its beginning, by the host at the other end."""

    @property
    def num_sent_nbytes(self) -> int:
        """Bytes sent since its beginning."""


class Exchange:
    """One sum of gradients: made when it is handed over, run by the engine. Any thread."""

    __slots__ = (
        *("_comm", "_recorder", "_sent_before", "coding_s", "ended", "nbytes", "number", "ready"),
        *("sent_nbytes", "started"),
    )

    def __init__(
        self, recorder: StepRecorder, comm: Traffic, number: int, nbytes: int, ready: Mark
    ) -> None:
        self._recorder, self._comm = recorder, comm
        self.number, self.nbytes = number, nbytes
        self.ready = recorder.clock.mark() if ready is None else ready
        self.started: Mark = None
        self.ended: Mark = None
        self.sent_nbytes = 0
        self.coding_s = {"encode": 0.0, "decode": 0.0}

    def begin(self) -> None:
        """The engine begins with it."""
        recorder = self._recorder
        recorder.running = self
        self._sent_before = self._comm.num_sent_nbytes
        self.started = recorder.clock.mark()

    def end(self) -> None:
        """The sum is there, or has failed."""
        recorder = self._recorder
        self.ended = recorder.clock.mark()
        recorder.running = None
        self.sent_nbytes = self._comm.num_sent_nbytes - self._sent_before
        recorder.exchanges.append(self)

    def line(self, clock: StepClock, begin: Mark) -> Bucket:
        """As it is written, in the step that has begun at a mark."""

        def after(mark: Mark) -> float:
            return round(clock.seconds(begin, mark), DIGITS)

        return Bucket(
            number=self.number,
            nbytes=self.nbytes,
            sent_nbytes=self.sent_nbytes,
            ready_s=after(self.ready),
            started_s=after(self.started),
            ended_s=after(self.ended),
            encode_s=round(self.coding_s["encode"], DIGITS),
            decode_s=round(self.coding_s["decode"], DIGITS),
        )


class Coding:
    """The time in which a codec encodes or decodes, on whichever thread it does. A context."""

    __slots__ = ("_began_s", "_before", "_phase", "_recorder")

    def __init__(self, recorder: StepRecorder | None, phase: Phase) -> None:
        self._recorder, self._phase = recorder, phase

    def __enter__(self) -> None:
        if self._recorder is not None:
            self._before = self._recorder.enter(self._phase)
            self._began_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        running = recorder.running
        if running is not None and recorder.clock.is_host:
            running.coding_s[self._phase] += time.perf_counter() - self._began_s
        recorder.leave(self._before)
