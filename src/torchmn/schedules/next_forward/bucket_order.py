"""Which bucket of an exchange is sent when: one static order, the same on all ranks.

    during backward:      while the link would idle, the bucket that is ready and needed soonest
    then:                 the footer (weights, flags)
    during next forward:  the rest, the bucket needed soonest first

Late layers are ready first and needed last, so that as many bytes of them as fit are sent during
backward; the early layers do not queue after the rest of them. The order is that of Jayarajan et
al., "Priority-based parameter propagation for distributed DNN training" (MLSys 2019), and of Peng
et al., "A generic communication scheduler for distributed DNN training acceleration"
(ByteScheduler, SOSP 2019), which choose the next chunk while they run. Here it is computed once,
from measured times, by simulating that choice: collectives need the same order on all ranks, and
ranks that choose while they run do not choose the same.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from torchmn.errors import UsageError
from torchmn.gradients.reducer import GradientReducer
from torchmn.schedules.next_forward.pass_meter import PassMeter

NUM_MEASURED = 3
"""Exchanges before the order is chosen, of which the first only warms up."""
LATENESS = 0.1
"""The part of its measured time that a gradient may be late without delaying others: a bucket is
planned to be ready that much later."""


@dataclass(frozen=True, kw_only=True)
class BucketTimes:
    """What was measured of one bucket."""

    link_s: float
    """How long the link is busy with it."""
    ready_s: float
    """When its last gradient is there, from the first gradient of backward."""
    needed_s: float
    """When its first parameter is used, from the beginning of forward."""


@dataclass(frozen=True, kw_only=True)
class BucketOrder:
    """The order in which buckets are sent, by index."""

    order: tuple[int, ...]
    num_early: int
    """How many are sent during backward, as soon as they and those before them are full."""

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise UsageError(f"{self.order} is not an order of buckets: each must be in it once.")
        if not 0 <= self.num_early <= len(self.order):
            raise UsageError(f"num_early={self.num_early} is outside 0..{len(self.order)}.")


def plan_order(
    times: Sequence[BucketTimes], *, backward_s: float, overlaps_backward: bool = True
) -> BucketOrder:
    """The order of these buckets and, after the last of them by index, the footer.

    ``backward_s`` is from the first gradient to the end of backward. With
    ``overlaps_backward=False`` no bucket may be sent before the end of backward.
    """
    early = _early(times, backward_s) if overlaps_backward else []
    chosen = set(early)
    rest = [index for index in range(len(times)) if index not in chosen]
    rest.sort(key=lambda index: (times[index].needed_s, index))
    return BucketOrder(order=(*early, len(times), *rest), num_early=len(early))


def _early(times: Sequence[BucketTimes], backward_s: float) -> list[int]:
    """Simulate a link that takes, when it is free, the ready bucket that is needed soonest."""
    coming = [(bucket.ready_s * (1 + LATENESS), index) for index, bucket in enumerate(times)]
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
            if now_s + times[index].link_s <= backward_s:
                order.append(index)
                now_s += times[index].link_s
        else:
            now_s = coming[0][0]
            if now_s >= backward_s:
                break
    return order


class OrderTuner:
    """Measures the passes and the exchanges of one layout of buckets, until the order is chosen.

    ``on_failure`` is called with a reason when rank 0 cannot choose one.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        models: Sequence[nn.Module],
        on_failure: Callable[[str], None],
    ) -> None:
        self._reducer = reducer
        self._on_failure = on_failure
        self._buckets = reducer.buffers.sets[0].buckets[:-1]  # less the footer's
        self.meter = PassMeter(models, reducer.buffers.sets[0].slot_of)
        self._num_exchanges = 0
        self._link_s: dict[int, float] = {}
        self._last_entry = 0

    def exchange_ended(self) -> BucketOrder | None:
        """Called at the end of every exchange, on all ranks; the order, if it is time.

        *Collective*: rank 0 decides.
        """
        self._num_exchanges += 1
        self._record_link_times(is_warm=self._num_exchanges > 1)
        if self._num_exchanges % NUM_MEASURED:
            return None
        comm = self._reducer.comm
        plan = comm.bcast_obj(self._make_plan() if comm.rank == 0 else None)
        if plan is None:
            if self._num_exchanges == 2 * NUM_MEASURED:
                self._on_failure("rank 0 did not see the model called in forward passes")
            return None
        order, num_early = plan
        return BucketOrder(order=tuple(order), num_early=num_early)

    def _record_link_times(self, *, is_warm: bool) -> None:
        """How long each bucket took; the minimum of all steps, for some wait for other ranks."""
        spans: dict[int, tuple[float, float]] = {}
        for entry in self._reducer.comm.flight_recorder.entries():
            if entry.number <= self._last_entry:
                continue
            self._last_entry = entry.number
            if is_warm and entry.bucket is not None and entry.ended_s is not None:
                first_s, _ = spans.get(entry.bucket, (entry.started_s, 0.0))
                spans[entry.bucket] = (first_s, entry.ended_s)
        for index, (first_s, last_s) in spans.items():
            self._link_s[index] = min(last_s - first_s, self._link_s.get(index, float("inf")))

    def _make_plan(self) -> tuple[list[int], int] | None:
        meter = self.meter
        if not (meter.has_seen_all and self._link_s):
            return None
        nbytes = [bucket.buffer.nbytes for bucket in self._buckets]
        # The time of small ones is mostly latency.
        rate = statistics.median(
            nbytes[index] / max(seconds, 1e-6)
            for index, seconds in self._link_s.items()
            if index < len(nbytes) and nbytes[index] >= max(nbytes) / 2
        )
        never = float("inf")
        times = [
            BucketTimes(
                link_s=size / rate,
                ready_s=max(
                    (meter.ready_s.get(slot.parameter, never) for slot in bucket.slots),
                    default=never,
                ),
                needed_s=min(
                    (meter.needed_s.get(slot.parameter, never) for slot in bucket.slots),
                    default=never,
                ),
            )
            for bucket, size in zip(self._buckets, nbytes, strict=True)
        ]
        plan = plan_order(
            times,
            backward_s=meter.backward_s,
            overlaps_backward=self._reducer.comm.overlaps_backward,
        )
        return list(plan.order), plan.num_early
