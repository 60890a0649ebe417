"""Gradients leave while backward still runs.

Hooks copy each gradient into its bucket as soon as it is final, and a full chunk (a bucket, or a
part of one) is handed to the communicator's engine; hooks only enqueue. Chunks leave in one order,
a `ChunkPlan`, the same on all ranks, so one that is full early waits for those before it. At the
end of backward a callback packs what had no gradient, sends the rest, and tells the schedule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchmn.communicators import Communicator
from torchmn.communicators.wire import create_wire
from torchmn.compression import Codec
from torchmn.errors import CommunicationError, UnsupportedError, UsageError
from torchmn.exchange.bucket_set import NUM_FOOTER, BucketSet, NonfiniteGradients, weight_unit
from torchmn.exchange.buckets import Bucket, NamedParameter, plan_buckets
from torchmn.exchange.chunk_plan import ChunkPlan
from torchmn.exchange.gradient_hook import watch_gradient
from torchmn.exchange.own_codec import codec_state, load_codec_state


class PassWatcher(Protocol):
    """Who is told of backward passes while they run. Every call may raise."""

    def gradient_arrived(self, parameter: Tensor) -> None:
        """A gradient is final and not packed yet; under no_sync() too. Local."""

    def filling_begins(self) -> None:
        """The first gradient of a pass will be written over the last exchange. *Collective*."""

    def filling_ends(self) -> None:
        """The backward pass is over; what has no gradient will be packed now. Local."""

    def layout_changed(self) -> None:
        """There are other chunks now, in the order of their index."""


class GradientExchange:
    """Watches the backward passes of some parameters and sums their gradients over ranks.

    ``num_sets`` sets of buckets take turns: with two, the means of one step are in use while the
    sums of the next are under way; with none, the exchange rests until `redirect`.
    ``on_backward_end`` is called when the gradients of a backward pass are packed and all buckets
    but the last were handed over.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Codec | None,
        parameters: Callable[[], Sequence[NamedParameter]],
        *,
        zero_fill: bool,
        num_sets: int,
        on_backward_end: Callable[[], None],
    ) -> None:
        self.comm = comm
        self.codec = codec
        self.zero_fill = zero_fill
        self.step = 0
        self.weight = 1.0
        self.num_samples = 0.0
        """What this rank's forward has seen since the last exchange or step, where it counts."""
        self.act_on_problem: Callable[[], None] = lambda: None
        """Raise or warn about `problem`, as the user has asked. *Collective.*"""
        self.is_resting = num_sets == 0
        """Whether nothing is exchanged: gradients stay this rank's own."""
        self.is_active = True
        self.is_syncing = True
        self.is_accumulating = False
        """Whether a gradient of this pass was added to the mean of an earlier one."""
        self.problem: NonfiniteGradients | None = None
        """What was not finite in the means in hand."""
        self.problems: list[NonfiniteGradients] = []
        self.parameters = parameters
        self.watcher: PassWatcher | None = None
        self.chunk_bytes: int | None = None
        """How buckets are cut at the next `rebuild`, see `cut`."""
        self._has_warned = False
        self._unit: float | None = None
        """In which weights are counted, see `BucketSet`; None: to be agreed on."""
        self._num_sets = max(1, num_sets)
        self._on_backward_end = on_backward_end
        self._hooks: list[RemovableHandle] = []
        self._backward_id: int | None = None
        self._failure: BaseException | None = None
        self.rebuild()

    def state_dict(self) -> dict[str, Any]:
        """What the codec of this rank remembers. Local."""
        return codec_state(self.codec, self.comm)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. What another rank owes is not ours to pay: it is left out."""
        load_codec_state(self.codec, self.comm, state)

    def progress(self) -> dict[str, Any]:
        """Where it stands: the same on all ranks. Local.

        With the unit of weights, for residues count in it: in another one they would be worth more
        or less beside the next gradients.
        """
        return {
            "step": self.step,
            "unit": self._unit,
            "problems": [asdict(problem) for problem in self.problems],
        }

    def load_progress(self, state: dict[str, Any]) -> None:
        """Go on from `progress`; an empty dict keeps the count of steps. On all ranks alike."""
        self.forget_weights()
        if not state:
            return
        self.step = state["step"]
        self.problems[:] = [NonfiniteGradients(**problem) for problem in state["problems"]]
        if self.filling.is_narrow:
            self._unit = state["unit"]

    # ---- layout ----

    def rebuild(self) -> None:
        """Lay out the buckets again, for the parameters that are trainable now."""
        self.close()
        known = self.parameters()
        trainable = [(n, p) for n, p in known if p.requires_grad and not self.is_resting]
        self._flags = [(p, p.requires_grad) for _, p in known]
        wire = create_wire(self.codec)
        num_footer = NUM_FOOTER + (0 if self.zero_fill else len(trainable))
        self.sets = [
            BucketSet(
                self.comm,
                wire,
                plan_buckets(
                    trainable,
                    granularity=self.comm.granularity,
                    bucket_bytes=self.comm.bucket_bytes,
                    num_footer=num_footer,
                    has_own_footer=self.chunk_bytes is not None,
                    allocate=self.comm.new_buffer,
                ),
                self.chunk_bytes,
            )
            for _ in range(self._num_sets)
        ]
        self.plan = ChunkPlan.in_order(len(self.sets[0].chunks))
        self._next_set = 0
        self.filling.warm_up()
        self._locate = {
            parameter: (bucket.index, position)
            for bucket in self.sets[0].buckets
            for position, parameter in enumerate(bucket.parameters)
        }
        self._order = self.sets[0].order
        if self.is_needed:
            self._hooks = [
                watch_gradient(p, self._on_gradient)
                for _, p in known
                if p.is_floating_point() or p.is_complex()
            ]
        self.forget_weights()
        self.restart()
        if self.watcher is not None:
            self.watcher.layout_changed()

    def cut(self, chunk_bytes: int | None) -> None:
        """Let chunks of about this size leave instead of buckets, and the footer in one of its own.

        *Collective*: sums may be rounded otherwise, the means are the same.
        """
        self.chunk_bytes = chunk_bytes
        self.rebuild()

    def redirect(
        self, comm: Communicator, codec: Codec | None, *, num_sets: int | None = None
    ) -> None:
        """Exchange over another communicator, in another form, from now on. *Collective.*"""
        self.comm, self.codec, self.is_resting = comm, codec, False
        self._num_sets = self._num_sets if num_sets is None else num_sets
        self.rebuild()

    def rest(self) -> None:
        """Exchange nothing until `redirect`: every ``p.grad`` stays this rank's own. Local."""
        self.is_resting = True
        self.rebuild()

    def close(self) -> None:
        """Watch no more backward passes."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do: one rank alone has its means already."""
        return not self.is_resting and (self.comm.size > 1 or self._num_sets > 1)

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
        for chunk in self.filling.chunks:
            chunk.num_ready = 0

    def forget_weights(self) -> None:
        """Agree anew on the unit of weights at the next exchange. On all ranks alike."""
        self._unit = None if self.filling.is_narrow else 1.0

    # ---- during backward ----

    def _on_gradient(self, parameter: Tensor) -> None:
        """A gradient is final: pack it, and hand over the chunks that are full in order."""
        if self.watcher is not None:
            self.watcher.gradient_arrived(parameter)
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
        # What was copied is let go of at once: the next layer's gradient then takes its memory,
        # where all of them together would cost 10,000 page faults a step for 60 MB.
        parameter.grad = bucket.slots[position]
        if self.comm.hides_exchange:
            self._start_full_chunks()

    def _open_backward(self, backward_id: int) -> None:
        self.raise_if_unfinished()
        if self.watcher is not None:
            self.watcher.filling_begins()
        self._backward_id = backward_id
        self.problem = None
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

    def _start_full_chunks(self) -> None:
        """Those that the plan holds back stay: nothing would hide them."""
        chunks, plan = self.filling.chunks, self.plan
        while self._num_started < plan.num_behind_backward:
            chunk = chunks[plan.order[self._num_started]]
            if not chunk.is_full:
                return
            self.filling.start(chunk, self.step)
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
        if self.filling.pack(bucket, position, scale):
            self.is_accumulating = True
        self._arrived.add(parameter)
        for chunk in self.filling.chunks_of[parameter]:
            chunk.num_ready += 1

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
            self.assign(self.filling)
            self.rebuild()
        self.finish_filling()
        self._on_backward_end()

    def finish_filling(self) -> None:
        """Pack what is not packed yet and hand over what the plan does not hold back."""
        self.raise_if_unfinished()
        if self.watcher is not None:
            if not self._arrived:
                self.watcher.filling_begins()
            self.watcher.filling_ends()
        filling = self.filling
        weight = self.weight if self.is_active else 0.0
        if self._unit is None:
            row = torch.tensor([weight, float(self.is_active)], dtype=torch.float64)
            total, num_active = self.comm.allreduce(row).tolist()
            self._unit = weight_unit(total, round(num_active))
        filling.unit = self._unit
        for bucket in filling.buckets:
            for position, parameter in enumerate(bucket.parameters):
                if parameter not in self._arrived:
                    self._pack(bucket, position)
        presence = [] if self.zero_fill else [p.grad is not None for p in self._order]
        filling.write_footer(
            weight,
            is_active=self.is_active,
            presence=[p and self.is_active for p in presence],
            num_samples=self.num_samples if self.is_active else 0.0,
        )
        if self.comm.hides_exchange:
            self._start_full_chunks()

    def start_rest(self) -> None:
        """Hand over what is left; return at once."""
        for index in self.plan.order[self._num_started :]:
            self.filling.start(self.filling.chunks[index], self.step)

    def sum_rest(self) -> None:
        """Sum what is left, on the calling thread if it can be."""
        for index in self.plan.order[self._num_started :]:
            self.filling.sum_now(self.filling.chunks[index], self.step)

    def expose(self, means: BucketSet) -> None:
        """Make every ``p.grad`` the mean, and None where there is none.

        There is none if no rank had a gradient (zero_fill off), and for a parameter that became
        trainable after these means were started. Collective, though it sends nothing.
        """
        self.inspect(means)
        self.assign(means)

    def assign(self, means: BucketSet) -> None:
        """`expose` without looking whether they are finite. Local."""
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
        self.adopt_unit(means)

    def adopt_unit(self, means: BucketSet) -> None:
        """Scale the next gradients as suits the weights of these. On all ranks alike."""
        if self.filling.is_narrow:
            self._unit = means.next_unit

    def inspect(self, means: BucketSet) -> None:
        """Take note of what is not finite in them. *Collective*, if there is something."""
        self.problem = means.nonfinite()
        if self.problem is not None:
            self.problems.append(self.problem)

    def warn_of_second_pass(self) -> None:
        """Say once that gradients were added to means, if they were. Local."""
        if self._has_warned or not self.is_accumulating:
            return
        self._has_warned = True
        warnings.warn(
            "More than one backward pass before step(): each one exchanges all gradients. The "
            "result is right, but wrap all passes but the last in optimizer.no_sync() to exchange "
            "once.",
            stacklevel=2,
        )

    def _fill_missing(self) -> None:
        """One rank alone treats a missing gradient as many do."""
        if self.zero_fill:
            for parameter, _ in self._flags:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
