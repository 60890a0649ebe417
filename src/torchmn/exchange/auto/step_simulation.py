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
from collections.abc import Iterable
from dataclasses import dataclass

_NEGLIGIBLE_S = 1e-12


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an exchange, a transfer or computation."""

    duration_s: float
    cpu_s: float


class StepSimulation:
    """The time that passes while a training thread computes, starts exchanges and waits for them.

    ``num_cores`` is what the threads of a rank share, below 1 where several ranks share a core.
    """

    def __init__(self, num_cores: float = 1.0) -> None:
        self.now_s = 0.0
        self._num_cores = num_cores
        self._exchanges: dict[object, deque[Part]] = {}
        """Started and not complete, in order; the first one is in progress."""
        self._left_s = 0.0
        """What the part in progress still takes; 0 before it begins."""

    def compute(self, seconds: float) -> None:
        """The training thread needs a core for this long; nothing happens if it is not positive."""
        while seconds > _NEGLIGIBLE_S:
            seconds -= self._advance(seconds)

    def start(self, key: object, parts: Iterable[Part]) -> None:
        """The training thread hands an exchange of at least one part to the exchange thread."""
        self._exchanges[key] = deque(parts)

    def wait(self, key: object) -> None:
        """The training thread waits for an exchange, which may never have been started."""
        while key in self._exchanges:
            self._advance(None)

    def _advance(self, compute_s: float | None) -> float:
        """Until one of the threads has finished what it does. Returns what was computed."""
        key = next(iter(self._exchanges), None)
        parts = self._exchanges.get(key)
        if parts and self._left_s == 0.0:
            self._left_s = max(parts[0].duration_s, parts[0].cpu_s, _NEGLIGIBLE_S)
        rate, part_rate = self._rates(
            parts[0] if parts else None, is_computing=compute_s is not None
        )
        spans = [] if compute_s is None else [compute_s / rate]
        if parts:
            spans.append(self._left_s / part_rate)
        span_s = min(spans)
        self.now_s += span_s
        if parts:
            self._left_s -= span_s * part_rate
            if self._left_s <= _NEGLIGIBLE_S:
                self._left_s = 0.0
                parts.popleft()
                if not parts:
                    del self._exchanges[key]
        return span_s * rate

    def _rates(self, part: Part | None, *, is_computing: bool) -> tuple[float, float]:
        """Of the training thread, and of the part: 1 where nothing holds it up."""
        num = self._num_cores
        if part is None:
            return min(1.0, num), 1.0
        needed = part.cpu_s / max(part.duration_s, part.cpu_s, _NEGLIGIBLE_S)
        if not is_computing:
            return 0.0, min(1.0, num / needed) if needed else 1.0
        given = min(needed, max(num / 2, num - 1.0))
        return min(1.0, num - given), given / needed if needed else 1.0
