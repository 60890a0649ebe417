"""Gradients leave while backward still runs.

Hooks copy each gradient into its bucket as soon as it is final, and a full chunk (a bucket, or a
part of one) is handed to the communicator's engine; hooks only enqueue. Chunks leave in one order,
a `ChunkPlan`, the same on all ranks, so one that is full early waits for those before it. At the
end of backward a callback packs what had no gradient, sends the rest, and tells the schedule.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchmn.communicators import Communicator
from torchmn.communicators.allreduce import create_allreduce
from torchmn.compression import Codec
from torchmn.errors import CommunicationError, RankMismatchError, UnsupportedError, UsageError
from torchmn.gradients.backward_pass import AtEnd, BackwardPass
from torchmn.gradients.bucket_set import (
    GIVEN_UP,
    LOADED,
    NUM_FOOTER,
    OTHER_LAYOUT,
    BucketSet,
    NonfiniteGradients,
    Reduction,
)
from torchmn.gradients.buckets import Bucket, NamedParameter, plan_buckets
from torchmn.gradients.chunk_order import ChunkPlan
from torchmn.gradients.codec_state import codec_state, load_codec_state
from torchmn.gradients.contribution import Contribution
from torchmn.gradients.gradient_memory import GradientMemory
from torchmn.gradients.parameter_facts import ParameterFacts
from torchmn.gradients.parameter_hook import has_later_hook, watch_gradient
from torchmn.gradients.sparse_gradients import mean_sparse_gradients
from torchmn.gradients.weight_sum import WeightAgreement


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


class GradientReducer:
    """Watches the backward passes of some parameters and sums their gradients over ranks.

    ``num_sets`` sets of buckets take turns: with two, the means of one step are in use while the
    sums of the next are under way; with none, the exchange rests until `redirect`.
    ``on_backward_end`` is called when the gradients of a backward pass are packed and all buckets
    but the last were handed over. With ``gradient_as_bucket_view`` every ``p.grad`` is the slot of
    its bucket, which the next pass overwrites; else it is memory of its own.

    A pass that an exception has ended is given up when the next one begins: the ranks end its
    exchange and throw it away. Parameters that have another dtype, device, shape or
    ``requires_grad`` than at the last pass are laid out again. Both must happen on all ranks; where
    it does not, all raise RankMismatchError, for the footer of each exchange holds what its ranks
    are about to do.
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
        gradient_as_bucket_view: bool = False,
        reduction: Reduction = "mean",
        find_sparse: Callable[[], Collection[nn.Parameter]] = tuple,
    ) -> None:
        self.comm = comm
        self.reduction = reduction
        self.codec = codec
        self.zero_fill = zero_fill
        self.step = 0
        self.contribution = Contribution()
        """This rank's weight in the next exchange or step, and its samples."""
        self.on_nonfinite_callback: Callable[[], None] = lambda: None
        """Raise or warn about `problem`, as the user has asked. *Collective.*"""
        self.is_suspended = num_sets == 0
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
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.memory = GradientMemory()
        """Of what scripts see as ``p.grad``."""
        self.has_loaded = False
        """Whether this rank has loaded a state since the last exchange."""
        self._unexchanged: set[Tensor] = set()
        """Parameters whose gradient holds passes under no_sync() that no exchange has taken."""
        self._has_warned = False
        self._has_warned_of_graphs = False
        self._unit: float | None = None
        """In which weights are counted, see `BucketSet`; None: to be agreed on."""
        self._num_sets = max(1, num_sets)
        self._find_sparse = find_sparse
        self._on_backward_end = on_backward_end
        self._hooks: list[RemovableHandle] = []
        self._lock = threading.RLock()
        """Autograd has a thread for each device."""
        self._pass: BackwardPass | None = None
        """The backward pass that has begun and not ended."""
        self._failure: BaseException | None = None
        self.rebuild()

    def state_dict(self) -> dict[str, Any]:
        """What the codec of this rank remembers. Local."""
        return codec_state(self.codec, self.comm)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. What another rank owes is not ours to pay: it is left out."""
        load_codec_state(self.codec, self.comm, state)

    def progress(self) -> dict[str, Any]:
        """Where it stands: the same on all ranks. Local."""
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
        trainable = [
            (n, p)
            for n, p in known
            if (p.requires_grad or p in self._unexchanged) and not self.is_suspended
        ]
        sparse = set(self._find_sparse())
        self._sparse = [(n, p) for n, p in trainable if p in sparse]
        trainable = [(n, p) for n, p in trainable if p not in sparse]
        self._facts = [ParameterFacts(p) for _, p in known]
        self._num_exchanges = 0
        self.memory.clear()
        wire = create_allreduce(self.codec)
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
                    footer_device=self._sparse[0][1].device if self._sparse else None,
                    allocate=self.comm.new_buffer,
                ),
                self.chunk_bytes,
                reduction=self.reduction,
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
        self.comm, self.codec, self.is_suspended = comm, codec, False
        self._num_sets = self._num_sets if num_sets is None else num_sets
        self.rebuild()

    def rest(self) -> None:
        """Exchange nothing until `redirect`: every ``p.grad`` stays this rank's own. Local."""
        self.is_suspended = True
        self.rebuild()

    def close(self) -> None:
        """Watch no more backward passes."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def owner(self) -> object:
        """Whose exchange it is: what is told of the end of backward passes."""
        return getattr(self._on_backward_end, "__self__", None)

    @property
    def weight(self) -> float:
        """Of this rank in the next mean."""
        return self.contribution.weight

    @property
    def num_samples(self) -> float:
        """What this rank's forward has seen since the last exchange or step, where it counts."""
        return self.contribution.num_samples

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do: one rank alone has its means already."""
        return not self.is_suspended and (self.comm.size > 1 or self._num_sets > 1)

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
        self.present: set[nn.Parameter] = set()
        """Those that were packed with a gradient."""
        self._agreement: WeightAgreement | None = None
        self.is_accumulating = False
        for chunk in self.filling.chunks:
            chunk.num_ready = 0

    def forget_weights(self) -> None:
        """Agree anew on the unit of weights at the next exchange. On all ranks alike."""
        self._unit = None if self.filling.is_narrow else 1.0

    # ---- during backward ----

    def _on_gradient(self, parameter: Tensor) -> None:
        """A gradient is final: pack it, and hand over the chunks that are full in order."""
        with self._lock:
            if self.watcher is not None:
                self.watcher.gradient_arrived(parameter)
            if not self.is_syncing:
                self._unexchanged.add(parameter)
                return
            pass_ = self._pass
            if pass_ is None or torch._C._current_graph_task_id() not in pass_.ids:
                pass_ = self._open_backward()
            place = self._locate.get(parameter)  # type: ignore[call-overload]
            if (
                place is None
                or self._unit is None
                or pass_.is_other_layout
                or has_later_hook(parameter, self._on_gradient)
            ):
                # Not in the layout, the unit of weights is not known yet, or the script has a hook
                # that comes later and may change it: the end of backward sees to it.
                return
            bucket_index, position = place
            bucket = self.filling.buckets[bucket_index]
            if parameter in self._arrived:
                raise UnsupportedError(
                    f"{self.comm.rank_label}: the gradient of '{bucket.names[position]}' came twice "
                    "in one backward pass, as torch.utils.checkpoint with use_reentrant=True does. "
                    "Use use_reentrant=False."
                )
            self._pack(bucket, position)
            # What was copied is let go of at once: the next layer's gradient then takes its memory,
            # where all of them together would cost 10,000 page faults a step for 60 MB.
            if self.gradient_as_bucket_view:
                parameter.grad = bucket.slots[position]
            elif not self.memory.is_mean(parameter):  # type: ignore[arg-type]
                parameter.grad = None
            if self.comm.overlaps_backward:
                self._start_full_chunks()

    def _open_backward(self) -> BackwardPass:
        """The first gradient of a backward pass, or of one that runs inside of it."""
        backward_id = torch._C._current_graph_task_id()
        if self._pass is not None and self._pass.is_running and self._failure is None:
            self._pass.ids.add(backward_id)
            return self._pass
        if self._failure is not None:
            self.raise_if_unfinished()
        if self._pass is not None:
            self._give_up_pass()
        if self.watcher is not None:
            self.watcher.filling_begins()
        self.problem = None
        callback = AtEnd(self._end_backward)
        self._pass = BackwardPass(backward_id, callback, is_other_layout=self._is_other_layout())
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._begin_exchange()
        return self._pass

    def _begin_exchange(self) -> None:
        """Sum the weights of all ranks, where that must come first; once for each exchange."""
        if self._agreement is not None:
            return
        if self._unit is None or self.filling.keeps_residuals:
            self._agreement = self.filling.agree_on_weight(
                self.weight if self.is_active else 0.0,
                is_active=self.is_active,
                unit=self._unit,
            )

    def _end_backward(self) -> None:
        ended, self._pass = self._pass, None
        try:
            if ended is not None and ended.is_nested and len(self._arrived) < len(self._locate):
                # More of it may come in another one, after this has been handed over.
                self._pass = ended
                raise UnsupportedError(
                    f"{self.comm.rank_label}: this backward pass runs in parts, as "
                    "torch.utils.checkpoint with use_reentrant=True does, and the first gradients "
                    "came from a part. Use use_reentrant=False."
                )
            self.exchange_now()
        except (UsageError, UnsupportedError):
            raise  # on all ranks, and nothing is under way: they may continue
        except BaseException as error:
            # Ranks that gave up a pass use the same buckets again, others the next ones.
            if self._num_sets > 1 or not isinstance(error, RankMismatchError):
                self._pass, self._failure = ended, error
            raise

    def raise_if_unfinished(self) -> None:
        """Raise if a backward pass began that did not end. Local.

        UsageError: it raised, and the gradients were not cleared since; CommunicationError: an
        exchange failed, or this is called inside of a pass.
        """
        if self._pass is None:
            return
        if self._failure is None and not self._pass.is_running:
            if self._pass.is_cleared:
                return
            raise UsageError(
                f"{self.comm.rank_label}: the backward pass before this raised an exception, so the "
                "gradients are not complete. Call optimizer.zero_grad() and run forward and "
                "backward again, or leave this step out; on all ranks."
            )
        if self._failure is None:
            raise UsageError(
                f"{self.comm.rank_label}: step() or an exchange is called inside of a backward pass, "
                "whose means are there when backward() has returned. Call step() after "
                "backward(), not in a hook of a gradient."
            )
        raise CommunicationError(
            f"{self.comm.rank_label}: the backward pass before this did not reach its end "
            f"({self._failure}), so the ranks no longer agree on what was exchanged. End the job "
            "and continue from the last checkpoint."
        )

    def _give_up_pass(self) -> None:
        """End the exchange of a pass that raised, and throw it away. *Collective.*

        Other ranks that have not given it up raise RankMismatchError at the end of theirs.
        """
        self._pass = None
        self._end_without_means(GIVEN_UP)
        self.restart()

    def _end_without_means(self, flag: int) -> None:
        """Send what is left of this exchange with a footer that says why there will be no means."""
        filling = self.filling
        self._begin_exchange()
        filling.unit = self._agreed_unit()
        for index in self.plan.order[self._num_started :]:
            filling.chunks[index].cargo.buffer.zero_()
        filling.write_footer(0.0, is_active=False, flags=(flag,), num_exchanges=self._num_exchanges)
        self._num_exchanges += 1
        self.reduce_remaining()
        filling.drain()

    def on_zero_grad(self) -> None:
        """Gradients were cleared. Local."""
        self._unexchanged.clear()
        if self._pass is not None:
            self._pass.is_cleared = True

    @property
    def has_unexchanged(self) -> bool:
        """Whether some ``p.grad`` holds passes under no_sync() that no exchange has taken."""
        return bool(self._unexchanged)

    def _is_other_layout(self) -> bool:
        """Whether parameters are not as they were when the buckets were laid out."""
        return any(facts.have_changed() for facts in self._facts)

    def _agreed_unit(self) -> float:
        """The unit of weights; it waits for the other ranks at the first exchange."""
        if self._unit is None and self._agreement is not None:
            self._unit = self._agreement.unit
        return self._unit or 1.0

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
                f"{self.comm.rank_label}: the gradient of '{bucket.names[position]}' is sparse "
                f"({grad.layout}), and its layer is none whose gradients are known to be: "
                "nn.Embedding and nn.EmbeddingBag with sparse=True. Use one of these, or dense "
                "gradients (sparse=False)."
            )
        if grad is not None and grad.requires_grad and not self._has_warned_of_graphs:
            self._has_warned_of_graphs = True
            warnings.warn(
                "backward(create_graph=True): every p.grad is a mean over ranks now, which has no "
                "graph, so that it cannot be differentiated again. For second derivatives take the "
                "gradients by torch.autograd.grad(loss, parameters, create_graph=True).",
                RuntimeWarning,
                stacklevel=2,
            )
        scale = self.weight / (self.comm.size * (self._unit or 1.0)) if self.is_active else 0.0
        if self.filling.pack(bucket, position, scale) or self.memory.is_mean(parameter):
            self.is_accumulating = True
        self._arrived.add(parameter)
        if grad is not None:
            self.present.add(parameter)
        for chunk in self.filling.chunks_of[parameter]:
            chunk.num_ready += 1

    # ---- at the end of backward ----

    def exchange_now(self) -> None:
        """Take the gradients as they are for those of this backward pass. *Collective.*"""
        if not self.is_needed:
            self._fill_missing()
            return
        if self._pass is not None:
            self.raise_if_unfinished()
            self._give_up_pass()
        if self._is_other_layout():
            self._lay_out_again()
        self.finish_filling()
        is_of_sums = self.is_accumulating and self.reduction == "sum"
        self._on_backward_end()
        if is_of_sums:
            raise UnsupportedError(
                f"{self.comm.rank_label}: this backward pass added to a sum over ranks, which was "
                "then added up over ranks once more (reduction='sum'). Call zero_grad() before "
                "each step, and wrap all passes of a step but the last in optimizer.no_sync()."
            )

    def _lay_out_again(self) -> None:
        """Parameters have changed, on all ranks; nothing of this pass was packed. *Collective.*

        Raises RankMismatchError on all ranks: not all have changed them.
        """
        self._end_without_means(OTHER_LAYOUT)
        self.restart()
        self.filling.raise_if_flags_differ()
        self.rebuild()

    def finish_filling(self) -> None:
        """Pack what is not packed yet and hand over what the plan does not hold back."""
        self.raise_if_unfinished()
        if self.watcher is not None:
            if not self._arrived:
                self.watcher.filling_begins()
            self.watcher.filling_ends()
        filling = self.filling
        self._begin_exchange()
        filling.unit = self._agreed_unit()
        for bucket in filling.buckets:
            for position, parameter in enumerate(bucket.parameters):
                if parameter not in self._arrived:
                    self._pack(bucket, position)
        presence = [] if self.zero_fill else [p in self.present for p in self._order]
        self._unexchanged.clear()
        filling.write_footer(
            self.weight if self.is_active else 0.0,
            is_active=self.is_active,
            presence=[p and self.is_active for p in presence],
            num_samples=self.num_samples if self.is_active else 0.0,
            flags=(LOADED,) if self.has_loaded and self.is_active else (),
            num_exchanges=self._num_exchanges,
        )
        self._num_exchanges += 1
        self.has_loaded = False
        if self.comm.overlaps_backward:
            self._start_full_chunks()

    def start_remaining(self) -> None:
        """Hand over what is left; return at once, or, with sparse gradients, when all is summed."""
        for index in self.plan.order[self._num_started :]:
            self.filling.start(self.filling.chunks[index], self.step)
        self._exchange_sparse()

    def reduce_remaining(self) -> None:
        """Sum what is left, on the calling thread if it can be."""
        for index in self.plan.order[self._num_started :]:
            self.filling.sum_now(self.filling.chunks[index], self.step)
        self._exchange_sparse()

    def _exchange_sparse(self) -> None:
        """The sparse gradients of this pass, after all sums on every rank."""
        if self._sparse:
            self.filling.sparse_means = mean_sparse_gradients(
                self.comm,
                [parameter for _, parameter in self._sparse],
                self.filling.weight,
                zero_fill=self.zero_fill,
                reduction=self.reduction,
            )

    def wait_and_expose(self, means: BucketSet) -> None:
        """Wait for all sums and `expose` the means, copying each bucket while others arrive."""
        try:
            if not self.gradient_as_bucket_view:
                for bucket in means.buckets:
                    means.await_bucket(bucket)
                    self._copy(bucket)
            was_scaled = means.wait()
        except BaseException:
            for parameter in means.order:
                parameter.grad = None  # what was copied are no means
            raise
        if was_scaled or self.gradient_as_bucket_view:
            self.assign(means)
        else:
            self._clear_absent(means)
        self.inspect(means)

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
            if self.gradient_as_bucket_view:
                bucket.expose()
            else:
                self._copy(bucket)
        self._clear_absent(means)

    def _copy(self, bucket: Bucket) -> None:
        """Make every ``p.grad`` of a bucket a copy of its slot."""
        pairs = [
            (parameter, slot)
            for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True)
            if parameter.requires_grad or parameter.grad is not None
        ]
        self.memory.set_all([p for p, _ in pairs], [slot for _, slot in pairs])

    def _clear_absent(self, means: BucketSet) -> None:
        """Clear every ``p.grad`` that has no mean among these."""
        if not self.zero_fill:
            for parameter, is_present in zip(means.order, means.presence, strict=True):
                if not is_present:
                    parameter.grad = None
        if all(means is not own for own in self.sets):  # of an earlier layout
            held = set(means.order)
            for parameter in self._order:
                if parameter not in held:
                    parameter.grad = None
        self.assign_sparse(means)
        self.adopt_unit(means)

    def assign_sparse(self, means: BucketSet) -> None:
        """Make every sparse ``p.grad`` its mean, or None where there is none. Local."""
        for parameter, mean in means.sparse_means.items():
            if parameter.requires_grad or parameter.grad is not None:
                parameter.grad = mean

    def adopt_unit(self, means: BucketSet) -> None:
        """Scale the next gradients as suits the weights of these. On all ranks alike."""
        if self.filling.is_narrow:
            self._unit = means.next_unit

    def inspect(self, means: BucketSet) -> None:
        """Take note of what is not finite in them. *Collective*, if there is something."""
        self.problem = means.nonfinite()
        if self.problem is None:
            self.problem = self._nonfinite_sparse(means)
        if self.problem is not None:
            self.problems.append(self.problem)

    def _nonfinite_sparse(self, means: BucketSet) -> NonfiniteGradients | None:
        """What is not finite among the sparse means, which are the same on all ranks. Local."""
        names = [
            name
            for name, parameter in self._sparse
            if (mean := means.sparse_means.get(parameter)) is not None
            and not mean._values().isfinite().all()
        ]
        return NonfiniteGradients(self.step, in_sum=names) if names else None

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
            for _, parameter in self.parameters():
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
