"""Gradients leave while backward still runs.

Hooks copy each gradient into its bucket as soon as it is final, and a full bucket is handed to the
communicator's engine; hooks only enqueue. Buckets leave in one fixed order on all ranks, so a
bucket that is full early waits for those before it. At the end of backward a callback packs what
had no gradient, sends the rest, and tells the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchmn.communicators import Communicator
from torchmn.communicators.engine import Work
from torchmn.communicators.wire import Wire
from torchmn.errors import CommunicationError, UnsupportedError, UsageError
from torchmn.exchange.buckets import Bucket, NamedParameter, plan_buckets

_WEIGHT, _ACTIVE, _NUM_FOOTER = 0, 1, 2  # then one presence flag per parameter if asked for


class BucketSet:
    """The buckets of one exchange and the sums under way in them."""

    def __init__(self, comm: Communicator, wire: Wire, buckets: list[Bucket]) -> None:
        self.comm = comm
        self.wire = wire
        self.buckets = buckets
        self.footer = buckets[-1].footer if buckets else torch.zeros(_NUM_FOOTER)
        self.works: list[Work[None]] = []

    def start(self, bucket: Bucket, step: int) -> None:
        """Hand one bucket to the engine."""
        self.works.append(
            self.comm.start_sum_(
                bucket.buffer,
                wire=self.wire,
                num_exact=bucket.footer.numel(),
                bucket=bucket.index,
                step=step,
            )
        )

    def sum_now(self, bucket: Bucket, step: int) -> None:
        """Sum one bucket and wait for it: without a change of thread if nothing is in flight."""
        self.comm.sum_(
            bucket.buffer,
            wire=self.wire,
            num_exact=bucket.footer.numel(),
            bucket=bucket.index,
            step=step,
        )

    def wait(self) -> None:
        """Wait for all sums and turn them into means.

        Raises UsageError on all ranks alike: the weights of the active ranks add up to zero.
        """
        for work in self.works:
            work.wait()
        self.works.clear()
        total = float(self.footer[_WEIGHT])
        if total == self.comm.size or not self.buckets:
            return
        if total == 0.0 and self.num_active:
            raise UsageError(
                f"{self.comm.speaker}: the weights of all ranks are zero. With weight='samples' "
                "the model's forward must see a tensor with a batch dimension; else call "
                "optimizer.set_weight(number_of_samples) before backward()."
            )
        factor = self.comm.size / total if total else 0.0
        for bucket in self.buckets:
            bucket.buffer[: bucket.buffer.numel() - bucket.footer.numel()].mul_(factor)
        self.declare_means()

    def declare_means(self) -> None:
        """Say that the buffers hold means already: `wait` leaves them as they are."""
        self.footer[_WEIGHT] = self.comm.size

    @property
    def num_active(self) -> int:
        """How many ranks took part with data of their own in the sum that was waited for."""
        return round(float(self.footer[_ACTIVE]))

    def named_means(self) -> dict[str, Tensor]:
        """Name to slot, for all parameters."""
        return {n: s for b in self.buckets for n, s in zip(b.names, b.slots, strict=True)}


class GradientExchange:
    """Watches the backward passes of some parameters and sums their gradients over ranks.

    ``num_sets`` sets of buckets take turns: with two, the means of one step are in use while the
    sums of the next are under way. ``on_backward_end`` is called when all buckets of a backward pass
    were handed over.
    """

    def __init__(
        self,
        comm: Communicator,
        wire: Wire,
        parameters: Callable[[], Sequence[NamedParameter]],
        *,
        zero_fill: bool,
        num_sets: int,
        on_backward_end: Callable[[], None],
    ) -> None:
        self.comm = comm
        self.wire = wire
        self.zero_fill = zero_fill
        self.step = 0
        self.weight = 1.0
        self.is_active = True
        self.is_syncing = True
        self._parameters = parameters
        self._num_sets = num_sets
        self._on_backward_end = on_backward_end
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._backward_id: int | None = None
        self.rebuild()

    # ---- layout ----

    def rebuild(self) -> None:
        """Lay out the buckets again, for the parameters that are trainable now."""
        for hook in self._hooks:
            hook.remove()
        trainable = [(n, p) for n, p in self._parameters() if p.requires_grad]
        self._trainable = [p for _, p in trainable]
        num_footer = _NUM_FOOTER + (0 if self.zero_fill else len(trainable))
        self.sets = [
            BucketSet(
                self.comm,
                self.wire,
                plan_buckets(
                    trainable,
                    granularity=self.comm.granularity,
                    bucket_bytes=self.comm.bucket_bytes,
                    num_footer=num_footer,
                ),
            )
            for _ in range(self._num_sets)
        ]
        self._next_set = 0
        self._locate = {
            parameter: (bucket.index, position)
            for bucket in self.sets[0].buckets
            for position, parameter in enumerate(bucket.parameters)
        }
        self._order = [p for b in self.sets[0].buckets for p in b.parameters]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in (self._order if self.is_needed else ())
        ]
        self.restart()

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do: one rank alone has its means already."""
        return self.comm.size > 1 or self._num_sets > 1

    @property
    def is_stale(self) -> bool:
        """Whether parameters were added, frozen or unfrozen since the layout."""
        now = [p for _, p in self._parameters() if p.requires_grad]
        return len(now) != len(self._trainable) or any(
            a is not b for a, b in zip(now, self._trainable, strict=True)
        )

    @property
    def filling(self) -> BucketSet:
        """The set that the current backward pass fills."""
        return self.sets[self._next_set]

    def turn(self) -> BucketSet:
        """Declare the set being filled as handed over and go on with the next one."""
        handed_over = self.filling
        self._next_set = (self._next_set + 1) % self._num_sets
        self.restart()
        return handed_over

    def restart(self) -> None:
        """Begin to fill the current set from nothing."""
        self._num_started = 0
        self._ready: set[nn.Parameter] = set()
        for bucket in self.filling.buckets:
            bucket.num_ready = 0

    # ---- during backward ----

    def _on_gradient(self, parameter: Tensor) -> None:
        """A gradient is final: pack it, and hand over the buckets that are full in order."""
        if not self.is_syncing:
            return
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self._backward_id:
            self._open_backward(backward_id)
        bucket_index, position = self._locate[parameter]  # type: ignore[index]
        bucket = self.filling.buckets[bucket_index]
        self._raise_if_not_exchangeable(bucket.names[position], parameter)
        self._ready.add(parameter)  # type: ignore[arg-type]
        bucket.pack(position, self._scale)
        bucket.num_ready += 1
        if self.comm.granularity == "bucket":
            self._start_full_buckets()

    def _open_backward(self, backward_id: int) -> None:
        if self._backward_id is not None:
            self._backward_id = None
            raise CommunicationError(
                f"{self.comm.speaker}: the backward pass before this one did not reach its end (did "
                "it raise?), so the ranks no longer agree on what was exchanged. End the job and go "
                "on from the last checkpoint."
            )
        self._backward_id = backward_id
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _end_backward(self) -> None:
        self._backward_id = None
        self.exchange_now()

    def exchange_now(self) -> None:
        """Take the gradients as they are for those of this backward pass."""
        self.finish_filling()
        self._on_backward_end()

    def _start_full_buckets(self) -> None:
        """The last bucket stays: it becomes full when backward ends, and no thread can hide it."""
        buckets = self.filling.buckets
        while self._num_started < len(buckets) - 1:
            bucket = buckets[self._num_started]
            if bucket.num_ready < len(bucket.parameters):
                return
            self.filling.start(bucket, self.step)
            self._num_started += 1

    # ---- at the end of backward ----

    def finish_filling(self) -> None:
        """Pack what is not packed yet and hand over all buckets but the last."""
        filling = self.filling
        for bucket in filling.buckets:
            if bucket.num_ready == len(bucket.parameters):
                continue
            for position, parameter in enumerate(bucket.parameters):
                if parameter not in self._ready:
                    bucket.pack(position, self._scale)
            bucket.num_ready = len(bucket.parameters)
        self._write_footer(filling)
        if self.comm.granularity == "bucket":
            self._start_full_buckets()

    def start_rest(self) -> None:
        """Hand over what is left; return at once."""
        for bucket in self.filling.buckets[self._num_started :]:
            self.filling.start(bucket, self.step)

    def sum_rest(self) -> None:
        """Sum what is left and wait for everything."""
        for bucket in self.filling.buckets[self._num_started :]:
            self.filling.sum_now(bucket, self.step)
        self.filling.wait()

    def expose(self, means: BucketSet) -> None:
        """Make every ``p.grad`` the mean; None stays None if no rank had a gradient (zero_fill off)."""
        for bucket in means.buckets:
            bucket.expose()
        if not self.zero_fill and means.buckets:
            for parameter, flag in zip(
                self._order, means.footer[_NUM_FOOTER:].tolist(), strict=True
            ):
                if flag == 0.0:
                    parameter.grad = None

    @property
    def _scale(self) -> float:
        """What this rank's gradients are multiplied by: its weight over the number of ranks."""
        return self.weight / self.comm.size if self.is_active else 0.0

    def _write_footer(self, filling: BucketSet) -> None:
        if not filling.buckets:
            return
        row = [self.weight if self.is_active else 0.0, float(self.is_active)]
        if not self.zero_fill:
            row += [float(p.grad is not None and self.is_active) for p in self._order]
        filling.footer.copy_(torch.tensor(row, dtype=torch.float64))

    def _raise_if_not_exchangeable(self, name: str, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and grad.layout != torch.strided:
            raise UnsupportedError(
                f"{self.comm.speaker}: the gradient of '{name}' is sparse ({grad.layout}). Only "
                "dense gradients are exchanged: make the layer with sparse=False."
            )
        if parameter in self._ready:
            raise UnsupportedError(
                f"{self.comm.speaker}: the gradient of '{name}' came twice in one backward pass, as "
                "torch.utils.checkpoint with use_reentrant=True does. Use use_reentrant=False."
            )
