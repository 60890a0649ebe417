"""Which chunk of an exchange leaves when: one static order, the same on all ranks.

    behind backward:      while the link would idle, the chunk that is ready and needed soonest
    then:                 the footer (weights, flags)
    behind next forward:  the rest, the chunk needed soonest first

Late layers are ready first and needed last, so that of them as many bytes leave behind backward as
fit; the early layers do not queue behind the others of them. The order is that of Jayarajan et al.,
"Priority-based parameter propagation for distributed DNN training" (MLSys 2019), and of Peng et
al., "A generic communication scheduler for distributed DNN training acceleration" (ByteScheduler,
SOSP 2019), which choose the next chunk while they run. Here it is computed once, from measured
times, by simulating that choice: collectives need the same order on all ranks, and ranks that
choose while they run do not choose alike. A pure function of what was measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torchmn.errors import UsageError

LATENESS = 0.1
"""By which part of the time that was measured a gradient may come later without holding up others:
a chunk is planned that much behind its time."""


@dataclass(frozen=True, kw_only=True)
class ChunkTimes:
    """What was measured of one chunk."""

    wire_s: float
    """How long the link is busy with it."""
    ready_s: float
    """When its last gradient is there, from the first gradient of backward."""
    needed_s: float
    """When its first parameter is used, from the beginning of forward."""


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """The order in which chunks leave, by index."""

    order: tuple[int, ...]
    num_behind_backward: int
    """So many leave as soon as they and those before them are full, the others when backward ends.
    """

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise UsageError(f"{self.order} is not an order of chunks: each must be in it once.")
        if not 0 <= self.num_behind_backward <= len(self.order):
            raise UsageError(
                f"num_behind_backward={self.num_behind_backward} is outside 0..{len(self.order)}."
            )

    @classmethod
    def in_order(cls, num_chunks: int) -> ChunkPlan:
        """By index, all but the last behind backward: no thread can hide that one."""
        return cls(order=tuple(range(num_chunks)), num_behind_backward=max(0, num_chunks - 1))


def plan_chunks(
    times: Sequence[ChunkTimes], *, backward_s: float, overlaps_backward: bool = True
) -> ChunkPlan:
    """The plan for these chunks and, behind the last of them by index, the footer.

    ``backward_s`` is from the first gradient to the end of backward. ``overlaps_backward=False``: no
    chunk may leave before the end of backward.
    """
    behind = _behind_backward(times, backward_s) if overlaps_backward else []
    chosen = set(behind)
    rest = [index for index in range(len(times)) if index not in chosen]
    rest.sort(key=lambda index: (times[index].needed_s, index))
    return ChunkPlan(order=(*behind, len(times), *rest), num_behind_backward=len(behind))


def _behind_backward(times: Sequence[ChunkTimes], backward_s: float) -> list[int]:
    """Simulate a link that takes, when it is free, the ready chunk that is needed soonest."""
    coming = [(chunk.ready_s * (1 + LATENESS), index) for index, chunk in enumerate(times)]
    heapq.heapify(coming)
    waiting: list[tuple[float, int]] = []
    order: list[int] = []
    now_s = 0.0
    while coming or waiting:
        while coming and coming[0][0] <= now_s:
            _, index = heapq.heappop(coming)
            heapq.heappush(waiting, (times[index].needed_s, index))
        if waiting:
            _, index = heapq.heappop(waiting)
            # One that does not fit is left for later; a shorter one may still.
            if now_s + times[index].wire_s <= backward_s:
                order.append(index)
                now_s += times[index].wire_s
        else:
            now_s = coming[0][0]
            if now_s >= backward_s:
                break
    return order
