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
from torch.utils.hooks import RemovableHandle

from torchmn.communicators import Communicator
from torchmn.communicators.wire import Wire
from torchmn.errors import CommunicationError, UnsupportedError, UsageError
from torchmn.exchange.bucket_set import NUM_FOOTER, BucketSet, weight_unit
from torchmn.exchange.buckets import Bucket, NamedParameter, plan_buckets


class GradientExchange:
    """Watches the backward passes of some parameters and sums their gradients over ranks.

    ``num_sets`` sets of buckets take turns: with two, the means of one step are in use while the
    sums of the next are under way. ``on_backward_end`` is called when the gradients of a backward
    pass are packed and all buckets but the last were handed over.
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
        self.is_accumulating = False
        """Whether a gradient of this pass was added to the mean of an earlier one."""
        self._parameters = parameters
        self._num_sets = num_sets
        self._on_backward_end = on_backward_end
        self._hooks: list[RemovableHandle] = []
        self._backward_id: int | None = None
        self._failure: BaseException | None = None
        self.rebuild()

    # ---- layout ----

    def rebuild(self) -> None:
        """Lay out the buckets again, for the parameters that are trainable now."""
        self.close()
        known = self._parameters()
        trainable = [(n, p) for n, p in known if p.requires_grad]
        self._flags = [(p, p.requires_grad) for _, p in known]
        num_footer = NUM_FOOTER + (0 if self.zero_fill else len(trainable))
        self.sets = [
            BucketSet(
                self.comm,
                self.wire,
                plan_buckets(
                    trainable,
                    granularity=self.comm.granularity,
                    bucket_bytes=self.comm.bucket_bytes,
                    num_footer=num_footer,
                    allocate=self.comm.new_buffer,
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
        self._order = self.sets[0].order
        if self.is_needed:
            self._hooks = [
                _watch(p, self._on_gradient)
                for _, p in known
                if p.is_floating_point() or p.is_complex()
            ]
        self.forget_weights()
        self.restart()

    def close(self) -> None:
        """Watch no more backward passes."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do: one rank alone has its means already."""
        return self.comm.size > 1 or self._num_sets > 1

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
        self._arrived: set[nn.Parameter] = set()
        self.is_accumulating = False
        for bucket in self.filling.buckets:
            bucket.num_ready = 0

    def forget_weights(self) -> None:
        """Agree anew on the unit of weights at the next exchange. On all ranks alike."""
        self._unit: float | None = None if self.filling.is_narrow else 1.0

    # ---- during backward ----

    def _on_gradient(self, parameter: Tensor) -> None:
        """A gradient is final: pack it, and hand over the buckets that are full in order."""
        if not self.is_syncing:
            return
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self._backward_id:
            self._open_backward(backward_id)
        place = self._locate.get(parameter)  # type: ignore[call-overload]
        if place is None or self._unit is None:
            # Trainable only since the layout was made, or the unit of weights is not known yet:
            # the end of backward sees to it.
            return
        bucket_index, position = place
        bucket = self.filling.buckets[bucket_index]
        if parameter in self._arrived:
            raise UnsupportedError(
                f"{self.comm.speaker}: the gradient of '{bucket.names[position]}' came twice in "
                "one backward pass, as torch.utils.checkpoint with use_reentrant=True does. Use "
                "use_reentrant=False."
            )
        self._pack(bucket, position)
        if self.comm.hides_exchange:
            self._start_full_buckets()

    def _open_backward(self, backward_id: int) -> None:
        self.raise_if_unfinished()
        self._backward_id = backward_id
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        backward_id, self._backward_id = self._backward_id, None
        try:
            self.exchange_now()
        except UsageError:  # raised on all ranks alike, nothing is under way: they may go on
            raise
        except BaseException as error:
            self._backward_id, self._failure = backward_id, error
            raise

    def raise_if_unfinished(self) -> None:
        """Raise CommunicationError if a backward pass began that did not end. Local."""
        if self._backward_id is not None:
            why = self._failure or "it raised, or this one runs inside it"
            raise CommunicationError(
                f"{self.comm.speaker}: the backward pass before this did not reach its end "
                f"({why}), so the ranks no longer agree on what was exchanged. End the job and go "
                "on from the last checkpoint."
            )

    def _start_full_buckets(self) -> None:
        """The last bucket stays: it becomes full when backward ends, and no thread can hide it."""
        buckets = self.filling.buckets
        while self._num_started < len(buckets) - 1:
            bucket = buckets[self._num_started]
            if bucket.num_ready < len(bucket.parameters):
                return
            self.filling.start(bucket, self.step)
            self._num_started += 1

    def _pack(self, bucket: Bucket, position: int) -> None:
        """Write this rank's part of a gradient: it times its weight over the number of ranks."""
        parameter = bucket.parameters[position]
        grad = parameter.grad
        if grad is not None and grad.layout != torch.strided:
            raise UnsupportedError(
                f"{self.comm.speaker}: the gradient of '{bucket.names[position]}' is sparse "
                f"({grad.layout}). Only dense gradients are exchanged: make the layer with "
                "sparse=False."
            )
        scale = self.weight / (self.comm.size * (self._unit or 1.0)) if self.is_active else 0.0
        if bucket.pack(position, scale):
            self.is_accumulating = True
        self._arrived.add(parameter)
        bucket.num_ready += 1

    # ---- at the end of backward ----

    def exchange_now(self) -> None:
        """Take the gradients as they are for those of this backward pass. *Collective.*"""
        if not self.is_needed:
            self._fill_missing()
            return
        if any(parameter.requires_grad is not flag for parameter, flag in self._flags):
            # Frozen or unfrozen since the layout, and buckets of it may have left on some ranks:
            # all ranks end that exchange. A mean that is exchanged again stays what it is.
            self.finish_filling()
            self.sum_rest()
            self.restart()
            self.filling.wait()
            self.rebuild()
        self.finish_filling()
        self._on_backward_end()

    def finish_filling(self) -> None:
        """Pack what is not packed yet and hand over all buckets but the last."""
        self.raise_if_unfinished()
        filling = self.filling
        weight = self.weight if self.is_active else 0.0
        if self._unit is None:
            row = torch.tensor([weight, float(self.is_active)], dtype=torch.float64)
            total, num_active = self.comm.allreduce(row).tolist()
            self._unit = weight_unit(total, round(num_active))
        filling.unit = self._unit
        for bucket in filling.buckets:
            if bucket.num_ready == len(bucket.parameters):
                continue
            for position, parameter in enumerate(bucket.parameters):
                if parameter not in self._arrived:
                    self._pack(bucket, position)
        presence = [] if self.zero_fill else [p.grad is not None for p in self._order]
        filling.write_footer(
            weight, is_active=self.is_active, presence=[p and self.is_active for p in presence]
        )
        if self.comm.hides_exchange:
            self._start_full_buckets()

    def start_rest(self) -> None:
        """Hand over what is left; return at once."""
        for bucket in self.filling.buckets[self._num_started :]:
            self.filling.start(bucket, self.step)

    def sum_rest(self) -> None:
        """Sum what is left, on the calling thread if it can be."""
        for bucket in self.filling.buckets[self._num_started :]:
            self.filling.sum_now(bucket, self.step)

    def expose(self, means: BucketSet) -> None:
        """Make every ``p.grad`` the mean, and None where there is none.

        There is none if no rank had a gradient (zero_fill off), and for a parameter that became
        trainable after these means were started. Collective, though it sends nothing.
        """
        for bucket in means.buckets:
            bucket.expose()
        if not self.zero_fill:
            for parameter, is_present in zip(means.order, means.presence, strict=True):
                if not is_present:
                    parameter.grad = None
        if all(means is not own for own in self.sets):  # of an earlier layout
            held = set(means.order)
            for parameter in self._order:
                if parameter not in held:
                    parameter.grad = None
        if self.filling.is_narrow:
            self._unit = means.next_unit

    def _fill_missing(self) -> None:
        """One rank alone treats a missing gradient as many do."""
        if self.zero_fill:
            for parameter, _ in self._flags:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)


def _watch(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call ``hook`` when a gradient is final, now or, for a frozen parameter, once it is not."""
    is_trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_trainable)
    return handle
