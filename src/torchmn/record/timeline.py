"""The clocks by which steps are measured: the host's clock, or CUDA events on a GPU's stream.

A mark is a moment: a number on the host, or on a GPU an event, whose time is known once the GPU has
passed it. Marks are compared later, so that nothing ever waits for the GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchmn.base.torch_private import current_graph_task_id
from torchmn.record.records import Bucket

Mark = Any  # of one clock: its own business, but that None is no mark


class StepClock(Protocol):
    """Takes marks and compares them."""

    is_host: bool
    """Whether a mark costs next to nothing, and is known at once."""

    def mark(self) -> Mark:
        """Mark the present; on a GPU, the moment when the thread's current stream gets here."""

    def is_over(self, mark: Mark) -> bool:
        """Whether the time of a mark is known. Never waits."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Return the seconds between two marks whose times are known."""


class HostClock:
    """The host's clock, `time.perf_counter`."""

    is_host = True
    mark = staticmethod(time.perf_counter)

    def is_over(self, mark: Mark) -> bool:
        """See `StepClock.is_over`."""
        return True

    def seconds(self, begin: Mark, end: Mark) -> float:
        """See `StepClock.seconds`."""
        return float(end - begin)


class GpuClock:
    """CUDA events on the current stream of the thread that takes a mark.

    While a script captures a CUDA graph on that stream, `mark` returns the last mark and `is_over`
    is False: a captured event has no time, and a query of any event makes the capture fail.
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
    """Return the clock for a type of device, such as ``cuda``."""
    if device != "cuda":
        return HostClock()
    import torch

    return GpuClock(
        lambda: torch.cuda.Event(enable_timing=True), torch.cuda.is_current_stream_capturing
    )


class TrainingThread:
    """The thread that trains: the one that makes this object, and for a GPU autograd's as well.

    Autograd has a thread for each GPU, which calls the hooks of a backward pass and, after all of
    them, what was queued for the end of the pass.
    """

    def __init__(self, clock: StepClock) -> None:
        self._has_own_of_autograd = not clock.is_host
        self._idents = [threading.get_ident()]

    def is_current(self) -> bool:
        """Whether the calling thread is the one that trains."""
        ident = threading.get_ident()
        if self._has_own_of_autograd and current_graph_task_id() != -1:
            self._idents[1:] = [ident]
        return ident in self._idents

    def move(self) -> bool:
        """Train on the calling thread from now on; returns whether it is another one."""
        ident, before = threading.get_ident(), self._idents[0]
        self._idents[0] = ident
        return ident != before


DIGITS = 7
"""Decimal places of seconds in the record: tenths of microseconds."""


@dataclass(slots=True)
class Exchange:
    """The times of one bucket's exchange, from when it is queued."""

    number: int
    nbytes: int
    ready: Mark
    started: Mark = None
    ended: Mark = None
    sent_nbytes: int = 0
    coding: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    """When a codec encoded or decoded: what, begin and end."""

    def coding_s(self, clock: StepClock, what: str) -> float:
        """Return the seconds in which a codec did ``what``: ``encode`` or ``decode``."""
        return sum(clock.seconds(*span) for name, *span in self.coding if name == what)

    def line(self, clock: StepClock, begin: Mark) -> Bucket:
        """Return the record of this exchange, in seconds after ``begin``, the begin of its step."""

        def after(mark: Mark) -> float:
            return round(clock.seconds(begin, mark), DIGITS)

        return Bucket(
            number=self.number,
            nbytes=self.nbytes,
            sent_nbytes=self.sent_nbytes,
            ready_s=after(self.ready),
            started_s=after(self.started),
            ended_s=after(self.ended),
            encode_s=round(self.coding_s(clock, "encode"), DIGITS),
            decode_s=round(self.coding_s(clock, "decode"), DIGITS),
        )
