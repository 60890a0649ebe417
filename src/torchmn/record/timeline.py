"""The two clocks by which a step is measured: the host's, or events on the stream of a GPU.

A mark is a moment. On the host it is a number. On a GPU it is an event, whose time is known once
the GPU has passed it: marks are compared later, and nothing ever waits for the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchmn.record.records import Bucket

Mark = Any  # of one clock: its own business, but that None is no mark


class StepClock(Protocol):
    """Takes marks and compares them."""

    is_host: bool
    """Whether a mark costs next to nothing, and is known at once."""

    def mark(self) -> Mark:
        """Now, on this thread: on a GPU, when its current stream gets here."""

    def is_over(self, mark: Mark) -> bool:
        """Whether a moment is known. Never waits."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        """From one moment to another, both known."""


class HostClock:
    """`time.perf_counter`."""

    is_host = True
    mark = staticmethod(time.perf_counter)

    def is_over(self, mark: Mark) -> bool:
        """See `StepClock.is_over`."""
        return True

    def seconds(self, begin: Mark, end: Mark) -> float:
        """See `StepClock.seconds`."""
        return float(end - begin)


class GpuClock:
    """Events with times, on the current stream of whichever thread takes a mark.

    While a script captures a CUDA graph on it, the last mark counts, and none is over: an event of
    a capture has no time, and asking for any event then makes the capture fail.
    """

    is_host = False

    def __init__(self, new_event: Callable[[], Any], is_capturing: Callable[[], bool]) -> None:
        self._new_event, self._is_capturing = new_event, is_capturing
        self._last: Any = None

    def mark(self) -> Mark:
        """See `StepClock.mark`."""
        if self._last is not None and self._is_capturing():
            return self._last
        event = self._new_event()
        event.record()
        self._last = event
        return event

    def is_over(self, mark: Mark) -> bool:
        """See `StepClock.is_over`."""
        return not self._is_capturing() and bool(mark.query())

    def seconds(self, begin: Mark, end: Mark) -> float:
        """See `StepClock.seconds`."""
        return float(begin.elapsed_time(end)) / 1e3


def clock_of(device: str) -> StepClock:
    """The clock of a device, by its type."""
    if device != "cuda":
        return HostClock()
    import torch

    return GpuClock(
        lambda: torch.cuda.Event(enable_timing=True), torch.cuda.is_current_stream_capturing
    )


DIGITS = 7
"""Of seconds in the record: tenths of microseconds."""


@dataclass(slots=True)
class Exchange:
    """One sum of gradients, from when it is queued."""

    number: int
    nbytes: int
    ready: Mark
    started: Mark = None
    ended: Mark = None
    sent_nbytes: int = 0
    coding_s: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "decode": 0.0})

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
