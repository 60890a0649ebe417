"""From the first exchanges to a plan: what is measured, and when all ranks switch to it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from torch import nn

from torchmn.gradients.chunk_order import ChunkPlan, ChunkTimes, plan_chunks
from torchmn.gradients.reducer import GradientReducer
from torchmn.schedules.next_forward.pass_meter import PassMeter

NUM_MEASURED = 3
"""Exchanges before the plan is made, of which the first only warms up."""


class PlanMaker:
    """Measures the passes and the exchanges of one layout of chunks, until there is a plan.

    ``on_failure`` is called with a reason when rank 0 cannot make one.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        models: Sequence[nn.Module],
        on_failure: Callable[[str], None],
    ) -> None:
        self._reducer = reducer
        self._on_failure = on_failure
        self._chunks = reducer.sets[0].chunks[:-1]  # less the footer's
        self.meter = PassMeter(models, reducer.sets[0].chunks_of)
        self._num_exchanges = 0
        self._wire_s: dict[int, float] = {}
        self._last_entry = 0

    def exchange_ended(self) -> ChunkPlan | None:
        """Called at the end of every exchange on all ranks alike; a plan, if it is time.

        *Collective*: rank 0 decides.
        """
        self._num_exchanges += 1
        self._note_wire_times(is_warm=self._num_exchanges > 1)
        if self._num_exchanges % NUM_MEASURED:
            return None
        comm = self._reducer.comm
        plan = comm.bcast_obj(self._make_plan() if comm.rank == 0 else None)
        if plan is None:
            if self._num_exchanges == 2 * NUM_MEASURED:
                self._on_failure("rank 0 did not see the model called in forward passes")
            return None
        order, num_behind_backward = plan
        return ChunkPlan(order=tuple(order), num_behind_backward=num_behind_backward)

    def _note_wire_times(self, *, is_warm: bool) -> None:
        """How long each chunk took; the least of all steps, for some wait for other ranks."""
        spans: dict[int, tuple[float, float]] = {}
        for entry in self._reducer.comm.journal.entries():
            if entry.number <= self._last_entry:
                continue
            self._last_entry = entry.number
            if is_warm and entry.bucket is not None and entry.ended_s is not None:
                first_s, _ = spans.get(entry.bucket, (entry.started_s, 0.0))
                spans[entry.bucket] = (first_s, entry.ended_s)
        for index, (first_s, last_s) in spans.items():
            self._wire_s[index] = min(last_s - first_s, self._wire_s.get(index, float("inf")))

    def _make_plan(self) -> tuple[list[int], int] | None:
        meter = self.meter
        if not (meter.has_seen_all and self._wire_s):
            return None
        nbytes = [chunk.cargo.buffer.nbytes for chunk in self._chunks]
        # Small ones say more of latency than of the link.
        rate = statistics.median(
            nbytes[index] / max(seconds, 1e-6)
            for index, seconds in self._wire_s.items()
            if index < len(nbytes) and nbytes[index] >= max(nbytes) / 2
        )
        never = float("inf")
        times = [
            ChunkTimes(
                wire_s=size / rate,
                ready_s=max((meter.ready_s.get(p, never) for p in chunk.parameters), default=never),
                needed_s=min(
                    (meter.needed_s.get(p, never) for p in chunk.parameters), default=never
                ),
            )
            for chunk, size in zip(self._chunks, nbytes, strict=True)
        ]
        plan = plan_chunks(
            times,
            backward_s=meter.backward_s,
            overlaps_backward=self._reducer.comm.overlaps_backward,
        )
        return list(plan.order), plan.num_behind_backward
