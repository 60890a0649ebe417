"""The exchanges of gradients as schedules use them: hand over, wait, assign, discard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.base.errors import RankMismatchError, ResultWarning, TorchmnError
from torchmn.base.warn import warn
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.agreements.facts import LateRanks, Presence
from torchmn.exchange.agreements.footer import Footer
from torchmn.exchange.agreements.weights import Weights
from torchmn.exchange.bucket_set import BucketSet
from torchmn.exchange.buckets import NamedParameter, Slot, plan_buckets
from torchmn.exchange.exchanged_parameters import ExchangedParameters
from torchmn.exchange.finiteness import (
    TAKEN,
    ArrivingFlags,
    NonfiniteGradients,
    NonfiniteLog,
)
from torchmn.exchange.gradient_memory import GradientMemory, GradientState, gradient_state
from torchmn.exchange.means import Means
from torchmn.exchange.options import GradientOptions
from torchmn.exchange.packing import Packing
from torchmn.exchange.sparse_gradients import mean_sparse_gradients
from torchmn.exchange.sums import Sums, load_means

_COUNTS_ZEROS = (
    "this rank called step() without backward(), which other ranks called, so that it counts in "
    "their mean as gradients of zero with weight {:g}. That is right if the loss of its batch is "
    "zero. If its batch is empty, or the loss is a mean over something that the batch has none of "
    "(positives, labelled samples, tokens), call optimizer.set_weight(their number) before each "
    "backward(), and set_weight(0) before a step() without one."
)

_NOT_TAKEN = "No step was made with these gradients."
CHANGED_AND_LATE = (
    "in the step before, gradients were changed between backward() and step(), as by "
    "clip_grad_norm_, and a rank without a backward pass had none to change. Its parameters are "
    "others now. Clip by create_multi_node_optimizer(max_grad_norm=...), or call backward() on all "
    "ranks: a batch of 0 rows will do."
)


class GradientExchange:
    """The exchanges of one reducer: the bucket sets that are filled in turns, and their means.

    When a backward pass has ended, a schedule calls `start` or `send`, which return the sums under
    way, and later `assign` or `discard` for each of them, in the same order on all ranks.

    Args:
        parameters: the parameters whose gradients are exchanged.
        num_sets: number of bucket sets; with two, the means of one step are in use while the sums
            of the next are under way.
        options: how gradients are combined. Without ``zero_fill`` the footer holds which gradients
            each rank has.
    """

    comm: Communicator
    """The communicator of the ranks, set by `lay_out`."""

    def __init__(
        self, parameters: ExchangedParameters, num_sets: int, options: GradientOptions
    ) -> None:
        self.num_sets = num_sets
        self.bucket_bytes: int | None = None
        """The least size of a bucket, except the first ones and the last one; None for the
        communicator's default."""
        self.scale: float | None = None
        """The `weight_scale` of the next exchange; None if the ranks have to agree on one."""
        self.zero_fill, self.reduction = options.zero_fill, options.reduction
        self.as_view = options.gradient_as_bucket_view
        """Whether the slots themselves become the gradients."""
        self.sets: list[BucketSet] = []
        self.filling: BucketSet
        """The set that the current backward pass fills."""
        self.packing: Packing | None = None
        """The exchange that has begun but was not handed over yet."""
        self.memory = GradientMemory()
        """The memory of the means that are copied into ``p.grad``."""
        self.nonfinite = NonfiniteLog()
        self.are_late_on_some = False
        """Whether some ranks, but not all, made the last exchange in `step`; see
        `share_with_late_ranks`."""
        self.num_in_step = 0
        """Number of exchanges since the last step, or since the gradients were cleared."""
        self.parameters, self.trained = parameters, parameters.trained
        self._late_states: list[GradientState] = []
        self._has_warned = False
        self._num_active, self._num_samples = 0, 0.0
        self.own_flags: ArrivingFlags | None = None
        """Whether the gradients of a single rank are finite, on the way from its GPU."""
        self.unsettled: Sums | None = None
        """The last sums, if `settle` has not examined them yet."""
        self._assigned: list[GradientState] = []
        """The states of the gradients right after the means of `unsettled` were assigned."""
        self.was_applied = False
        """Whether a step has applied the last means before the host knew that they are valid."""
        self._was_changed = False
        """Whether the script changed those gradients before the step."""
        self._own_gradients: dict[Tensor, Tensor] | None = None
        """The gradients of this rank's last backward pass; None if no schedule wants them."""
        self.is_plain = False
        """Whether a ``p.grad`` that is an earlier mean is always its slot's own tensor, and no
        schedule wants the rank's own gradients: packing then needs no `note_own`."""

    # ---- what is exchanged ----

    def fill_missing(self) -> None:
        """Treat missing gradients as an exchange would, for a step without exchange. Local."""
        if self.zero_fill:
            for _, parameter in self.trained():
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)

    # ---- layout ----

    def lay_out(
        self,
        comm: Communicator,
        codec: Codec | None,
        parameters: Sequence[NamedParameter],
        sparse: Sequence[NamedParameter],
        watched: Sequence[nn.Parameter],
        agreements: Callable[[], Sequence[Agreement]] = tuple,
    ) -> None:
        """Create the bucket sets for these parameters. *Collective.*

        ``sparse`` parameters are in no bucket. ``watched`` are the parameters with a hook, see
        `BucketSet.number`. ``agreements`` is called once per set and returns its agreements.
        """
        self.comm, self._engine = comm, comm.engine
        self.packing = self.unsettled = None
        self.memory.clear()
        algorithm = comm.route.allreduce_algorithm(codec)

        def new_set() -> BucketSet:
            presence = [] if self.zero_fill else [Presence(len(parameters))]
            weights = Weights(may_be_zero=self.reduction == "sum")
            footer = Footer(comm, [*agreements(), *presence], weights=weights)
            buckets = plan_buckets(
                parameters,
                granularity=comm.route.granularity,
                bucket_bytes=self.bucket_bytes or comm.route.bucket_bytes,
                first_bytes=comm.route.first_bucket_bytes,
                num_footer=footer.num_values,
                footer_device=sparse[0][1].device if sparse else None,
                allocate=comm.route.new_buffer,
            )
            return BucketSet(comm, algorithm, buckets, footer=footer, reduction=self.reduction)

        self.sets = [new_set() for _ in range(self.num_sets)]
        for each in self.sets:
            each.number(watched)
        self.filling = self.sets[0]
        self.filling.warm_up()
        self._find_out_if_plain()
        self.forget_scale()

    @property
    def is_narrow(self) -> bool:
        """Whether values beyond float16's range would be lost in transfer."""
        return self.filling.is_narrow

    def forget_scale(self) -> None:
        """Agree anew on the weight scale at the next exchange. *Collective.*"""
        self.scale = None if self.filling.is_narrow else 1.0

    def adopt_scale(self, sums: Sums) -> None:
        """Use the weight scale that suits these sums for the next exchange.

        *Collective*, though it sends nothing.
        """
        if self.filling.is_narrow:
            self.scale = sums.next_scale

    def _find_out_if_plain(self) -> None:
        are_lent = self.as_view or all(slot.may_lend for slot in self.filling.slots)
        self.is_plain = len(self.sets) == 1 and are_lent and self._own_gradients is None

    # ---- what a rank itself has computed ----

    def keep_own_gradients(self) -> None:
        """Keep this rank's gradients of each backward pass for `take_own_gradients`. Local."""
        self._own_gradients = {}
        self._find_out_if_plain()

    def take_own_gradients(self) -> dict[Tensor, Tensor]:
        """Return this rank's dense gradients of the last pass; empty if none are kept. Local."""
        if self._own_gradients is None:
            return {}
        own, self._own_gradients = self._own_gradients, {}
        return own

    def note_own(self, slots: Sequence[Slot]) -> set[Slot]:
        """Keep gradients that are about to be packed, if a schedule wants them. Local.

        Returns the slots whose gradient is the mean of an earlier pass, possibly with the gradient
        of this one added.
        """
        means = set()
        for slot in slots:
            grad, number = slot.parameter.grad, slot.number
            if grad is None:
                continue
            if self.memory.is_mean(slot.parameter) or any(
                (other := each.slot_at[number]) is not None and other.tensor is grad
                for each in self.sets
            ):
                means.add(slot)
            if self._own_gradients is not None:
                is_reused = slot in means or self.as_view
                self._own_gradients[slot.parameter] = grad.clone() if is_reused else grad
        return means

    # ---- handing over ----

    def begin(self, context: PassContext, step: int) -> None:
        """Begin an exchange; ``context`` is this rank's part. *Collective*, but does not wait."""
        self.nonfinite.current = None  # no step has applied these means
        if self._own_gradients:
            self._own_gradients = {}  # of a pass that raised
        self.packing = Packing(self.filling, context, self.scale)

    def start(self) -> Sums:
        """Hand over the remaining buckets, and return the sums under way. *Collective.*

        Does not wait, unless there are sparse gradients, which are exchanged here.
        """
        sums = self.filled.sums
        return self._handed_over(sums.start_remaining())

    def send(self) -> Sums:
        """Sum the remaining buckets on the calling thread if the engine is idle; else `start`.

        *Collective.*
        """
        if not self._engine.is_idle:  # earlier buckets are under way, and must come first
            return self.start()
        sums = self.filled.sums
        return self._handed_over(sums.reduce_remaining())

    def give_up(self) -> Sums:
        """Complete the exchange with zeros, and wait for it. *Collective.*

        The same buckets are filled next.
        """
        sums = self.filled.give_up()
        self._exchange_sparse(sums)
        sums.drain()
        self.packing = None
        return sums

    @property
    def filled(self) -> Packing:
        """The exchange that has begun; there must be one."""
        packing = self.packing
        assert packing is not None  # noqa: S101 - `begin` was called
        return packing

    def _exchange_sparse(self, sums: Sums) -> None:
        """Exchange the sparse gradients of this pass, after its buckets. *Collective.*"""
        if self.parameters.sparse:
            sums.sparse_means = mean_sparse_gradients(
                self.comm,
                [parameter for _, parameter in self.parameters.sparse],
                sums.context.weight,
                zero_fill=self.zero_fill,
                reduction=self.reduction,
            )

    def load_means(self, means: dict[str, Tensor | None], record: dict[str, Any] | None) -> Sums:
        """Return saved means as `Sums`, as if they had just been summed. Local.

        Raises UsageError: they are those of other parameters.
        """
        sums = load_means(self.filling, means, record)
        self._turn()
        return sums

    def take_back(self, sums: Sums) -> None:
        """Fill the buckets of these sums next: their values are not needed. Local."""
        self.filling = sums.buckets

    def _handed_over(self, sums: Sums) -> Sums:
        self._exchange_sparse(sums)
        self.packing = None
        self._turn()
        return sums

    def _turn(self) -> None:
        """Fill the next set from now on."""
        self.filling = self.sets[(self.sets.index(self.filling) + 1) % len(self.sets)]

    # ---- what has arrived ----

    def assign(self, sums: Sums) -> None:
        """Wait for the sums and set every ``p.grad`` to its mean, or to None if there is none.

        There is no mean if no rank had a gradient and ``zero_fill`` is off, or if the parameter
        became trainable after these sums were started. Buckets that have arrived are copied while
        others are under way. *Collective*, though nothing is sent unless a gradient was not finite.

        On a GPU the host does not wait: `settle` later examines the footer of these sums.
        """
        is_current = len(self.sets) == 1 and sums.buckets is self.filling  # summed in this pass
        defers = is_current and sums.buckets.is_deferred
        means = Means(sums)
        means.assign(self.memory, as_view=self.as_view, is_current=is_current, is_on_device=defers)
        footer = sums.footer
        if not defers and footer.to_report:
            footer.report(sums.context)
        if not self.zero_fill and not sums.are_all_present:
            means.clear_absent()
        if sums.buckets not in self.sets:  # of an earlier layout
            earlier = sums.buckets
            for parameter in self.filling.slot_of:
                if parameter not in earlier.slot_of:
                    parameter.grad = None
        means.assign_sparse()
        # On a GPU: the checks of `discard` need the footer on the host, and are left to `settle`.
        if defers:
            self.unsettled, self.was_applied = sums, False
            self._assigned = self.gradient_states()
            return
        found = self.discard(sums)
        if found is not None and found.is_elsewhere:
            means.spread_nonfinite()

    def discard(self, sums: Sums) -> NonfiniteGradients | None:
        """Wait for sums and record their facts, without assigning them to gradients.

        *Collective*, see `record_nonfinite`. Returns the gradients that were not finite.
        """
        weights = sums.footer.weights
        sums.read()
        self._num_active, self._num_samples = weights.num_active, weights.num_samples
        self._note_late_ranks(sums)
        self.adopt_scale(sums)
        return self.record_nonfinite(sums)

    # ---- what the host learns later than the device ----

    def note_step(self) -> None:
        """Note that the optimizer is about to apply the means. Local."""
        if self.unsettled is not None:
            self.was_applied = True
            self._was_changed = self._assigned != self.gradient_states()

    def settle(self) -> bool:
        """Examine the footer of the last sums, if that was put off so as not to wait for the GPU.

        *Collective*, if something was not finite. Called before the next exchange begins, so that
        all ranks raise the same error at the same point. Returns whether a step has applied means
        that were not finite. Raises RankMismatchError and others, as the exchange would have done.
        """
        own, self.own_flags = self.own_flags, None
        if own is not None:
            self.was_applied = self.record_problem(own.found(), own.step) is not None
            return self.was_applied
        sums, self.unsettled, self._assigned = self.unsettled, None, []
        if sums is None:
            return False
        try:
            sums.settle()
            sums.footer.report(sums.context)
            self.discard(sums)
            if self.are_late_on_some and self.was_applied and self._was_changed:
                raise RankMismatchError(f"{self.comm.rank_label}: {CHANGED_AND_LATE}")
        except TorchmnError as error:
            applied = TAKEN if self.was_applied else _NOT_TAKEN
            raise type(error)(f"{error} {applied}") from error
        finally:
            self.are_late_on_some, self._late_states = False, []  # too late to share gradients
        return self.nonfinite.current is not None and self.was_applied

    @property
    def num_active(self) -> int:
        """Number of ranks that had data in the last exchange. On a GPU the host waits for it."""
        return self._num_active if self.unsettled is None else self.unsettled.num_active

    @num_active.setter
    def num_active(self, num_active: int) -> None:
        self._num_active = num_active

    @property
    def num_samples(self) -> float:
        """Samples of all ranks in the last exchange, where they are counted.

        On a GPU the host waits for it.
        """
        return self._num_samples if self.unsettled is None else self.unsettled.num_samples

    # ---- the gradients ----

    def clear(self) -> None:
        """Set every ``p.grad`` to None. Local."""
        for parameter in self.filling.slot_of:
            parameter.grad = None
        for _, parameter in self.parameters.sparse:
            parameter.grad = None

    # ---- ranks that exchange in `step` ----

    def _note_late_ranks(self, sums: Sums) -> None:
        """Note whether some ranks made an exchange late, and the gradients as they are now. Local.

        Warns once if this rank counted with zeros in a mean, though it has a weight.
        """
        late = sums.footer.get(LateRanks)
        self.are_late_on_some = late.are_some_late
        self._late_states = self.gradient_states() if self.are_late_on_some else []
        weight = sums.context.weight
        counts_zeros = late.is_late and not late.has_gradients and self.reduction == "mean"
        if self.are_late_on_some and counts_zeros and weight and not self._has_warned:
            self._has_warned = True
            warn(f"{self.comm.rank_label}: {_COUNTS_ZEROS.format(weight)}", ResultWarning)

    @property
    def were_changed(self) -> bool:
        """Whether the script changed gradients since an exchange that some ranks made late."""
        return self._late_states != self.gradient_states()

    def gradient_states(self) -> list[GradientState]:
        """The states of all gradients; a later one differs if the script changed any. Local."""
        sparse = (parameter for _, parameter in self.parameters.sparse)
        return [gradient_state(p) for p in (*self.filling.slot_of, *sparse)]

    # ---- what is not finite ----

    def record_nonfinite(self, sums: Sums) -> NonfiniteGradients | None:
        """Record the gradients that are not finite in these sums. *Collective*, if there are any.

        See `record_problem`.
        """
        found = sums.nonfinite()
        if found is None and sums.sparse_means:
            found = self._nonfinite_sparse(sums)
        return self.record_problem(found, sums.context.step)

    def record_problem(
        self, found: NonfiniteGradients | None, step: int
    ) -> NonfiniteGradients | None:
        """Record a problem that this rank, or one that holds another part of the model, has found.

        *Collective over the ranks of the model*, which must all react in the same way.
        """
        mesh = self.parameters.mesh
        if mesh.any(found is not None) and found is None:
            found = NonfiniteGradients(step, is_elsewhere=True)
        return self.nonfinite.record(found)

    def _nonfinite_sparse(self, sums: Sums) -> NonfiniteGradients | None:
        """Return the sparse means that are not finite; they are the same on all ranks. Local."""
        names = [
            name
            for name, parameter in self.parameters.sparse
            if (mean := sums.sparse_means.get(parameter)) is not None
            and not mean._values().isfinite().all()
        ]
        return NonfiniteGradients(sums.context.step, in_sum=names) if names else None
