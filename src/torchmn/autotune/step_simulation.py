"""A training thread and the exchange thread beside it, on the cores that a rank has.

The training thread computes, starts exchanges and waits for them; the exchange thread does them one
after another. Each part of an exchange lasts at least ``duration_s`` (bytes on the link, or its
computation) and needs ``cpu_s`` of a core. With fewer cores than both need they share what there
is, in equal parts unless one needs less than its part: what an exchange takes from the core delays
the training thread by as much, and what falls into a wait of that thread delays nothing.

Pure functions of numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NEGLIGIBLE_S = 1e-12


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an exchange; ``is_on_link`` if it is the transfer, not computation."""

    duration_s: float
    cpu_s: float
    is_on_link: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """The training thread needs a core for this long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    """The training thread hands an exchange to the exchange thread."""

    key: object
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Wait:
    """The training thread waits for an exchange, which may never have been started."""

    key: object


@dataclass(frozen=True, slots=True)
class Mark:
    """The time is noted here."""


Instruction = Compute | Start | Wait | Mark


@dataclass(frozen=True, kw_only=True)
class Core:
    """What the threads of a rank share.

    ``num``: cores per rank, below 1 where several ranks share one. ``interference``: the part of
    the training thread's speed that is lost while a transfer runs on the same core, to interrupts
    and evicted caches. ``wake_s``: how long a transfer waits for the exchange thread to get the
    core while the training thread computes on it.
    """

    num: float = 1.0
    interference: float = 0.0
    wake_s: float = 0.0


def simulate(program: Iterable[Instruction], core: Core) -> list[float]:
    """The times of the marks of a program, in seconds after its beginning."""
    return _Simulation(core).run(program)


class _Simulation:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._now_s = 0.0
        self._queue: deque[Start] = deque()
        self._parts: deque[Part] = deque()
        self._left_s = 0.0
        """Of the first of the parts."""
        self._pending: set[object] = set()

    def run(self, program: Iterable[Instruction]) -> list[float]:
        marks = []
        for instruction in program:
            match instruction:
                case Compute(seconds):
                    while seconds > _NEGLIGIBLE_S:
                        seconds -= self._advance(seconds)
                case Start(key, _):
                    self._pending.add(key)
                    self._queue.append(instruction)
                case Wait(key):
                    while key in self._pending:
                        self._advance(None)
                case Mark():
                    marks.append(self._now_s)
        return marks

    def _advance(self, compute_s: float | None) -> float:
        """Until one of the threads has finished what it does. Returns what was computed."""
        part = self._current_part(is_computing=compute_s is not None)
        rate, part_rate = self._rates(part, is_computing=compute_s is not None)
        spans = [] if compute_s is None else [compute_s / rate]
        if part is not None:
            spans.append(self._left_s / part_rate)
        if not spans:  # what was waited for had no parts
            return 0.0
        span_s = min(spans)
        self._now_s += span_s
        if part is not None:
            self._left_s -= span_s * part_rate
            if self._left_s <= _NEGLIGIBLE_S:
                self._parts.popleft()
                self._left_s = 0.0
                if not self._parts:
                    self._pending.discard(self._queue.popleft().key)
        return span_s * rate

    def _current_part(self, *, is_computing: bool) -> Part | None:
        while not self._parts and self._queue:
            self._parts.extend(self._queue[0].parts)
            if not self._parts:
                self._pending.discard(self._queue.popleft().key)
        if not self._parts:
            return None
        part = self._parts[0]
        if self._left_s == 0.0:
            self._left_s = max(part.duration_s, part.cpu_s, _NEGLIGIBLE_S)
            if part.is_on_link and is_computing and self._core.num < 2:
                self._left_s += self._core.wake_s
        return part

    def _rates(self, part: Part | None, *, is_computing: bool) -> tuple[float, float]:
        """Of the training thread, and of the part: 1 where nothing holds it up."""
        num = self._core.num
        if part is None:
            return min(1.0, num), 1.0
        needed = part.cpu_s / max(part.duration_s, part.cpu_s, _NEGLIGIBLE_S)
        if not is_computing:
            return 0.0, min(1.0, num / needed) if needed else 1.0
        given = min(needed, max(num / 2, num - 1.0))
        rate = min(1.0, num - given)
        if part.is_on_link and num < 2:
            rate *= 1.0 - self._core.interference
        return rate, given / needed if needed else 1.0
