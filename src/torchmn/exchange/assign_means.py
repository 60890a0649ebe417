"""From the means in the buckets to every ``p.grad``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from torchmn.comm.local_tensors import division_of
from torchmn.exchange.agreements.joint_pass import JointPass
from torchmn.exchange.agreements.late_ranks import LateRanks
from torchmn.exchange.bucket_set import BucketSet
from torchmn.exchange.buckets import Slot
from torchmn.exchange.exchange_buffers import ExchangeBuffers
from torchmn.exchange.exchanged_parameters import ExchangedParameters
from torchmn.exchange.finiteness import NonfiniteGradients, NonfiniteLog
from torchmn.exchange.gradient_memory import GradientMemory, GradientState, gradient_state
from torchmn.exchange.gradient_norms import NormListener

_COUNTS_ZEROS = (
    "this rank called step() without backward(), which other ranks called, so that it counts in "
    "their mean as gradients of zero with weight {:g}. That is right if the loss of its batch is "
    "zero. If its batch is empty, or the loss is a mean over something that the batch has none of "
    "(positives, labelled samples, tokens), call optimizer.set_weight(their number) before each "
    "backward(), and set_weight(0) before a step() without one."
)


class MeanAssignment:
    """Makes the means of a reducer the gradients of its parameters, and looks after them.

    Args:
        parameters: those of the reducer.
        buffers: its buckets.
        as_view: whether the slots themselves become the gradients.
    """

    def __init__(
        self, parameters: ExchangedParameters, buffers: ExchangeBuffers, *, as_view: bool
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._as_view = as_view
        self.memory = GradientMemory()
        """Of what scripts see as ``p.grad``."""
        self.nonfinite = NonfiniteLog()
        self.norm_listener: NormListener | None = None
        self.are_late_on_some = False
        """Whether some ranks made the last exchange in `step`; see `ranks_without_backward`."""
        self.are_joint = False
        """Whether it was made in a backward pass that other optimizers share."""
        self._late_states: list[GradientState] = []
        self._has_warned = False

    def assign(self, means: BucketSet) -> None:
        """Wait for the means and make every ``p.grad`` its mean, and None where there is none.

        There is none if no rank had a gradient (zero_fill off), and for a parameter that became
        trainable after these means were started. Buckets are copied while others arrive.
        *Collective*, though it sends nothing unless something was not finite.
        """
        assign_means(means, self.memory, as_view=self._as_view)
        if means.footer.to_report:
            means.footer.report(means.context)
        self._clear_absent(means)
        assign_sparse_means(means)
        self.note_late_ranks(means)
        self._buffers.adopt_scale(means)
        self._report_norms(means)
        found = self.record_nonfinite(means)
        if found is not None and found.is_elsewhere:
            spread_nonfinite(means)

    def discard(self, means: BucketSet) -> None:
        """Take note of means that no gradient becomes. *Collective*, see `record_nonfinite`."""
        self.note_late_ranks(means)
        self.record_nonfinite(means)
        self._report_norms(means)
        self._buffers.adopt_scale(means)

    def note_late_ranks(self, means: BucketSet) -> None:
        """Take note of whether ranks made an exchange late, and of the gradients now. Local."""
        late = means.footer.get(LateRanks)
        self.are_late_on_some = late.are_some_late
        self.are_joint = self.are_late_on_some and means.footer.get(JointPass).is_joint
        self._late_states = self.gradient_states() if self.are_late_on_some else []
        weight = means.context.weight
        counts_zeros = late.is_late and not late.has_gradients and self._buffers.reduction == "mean"
        if self.are_late_on_some and counts_zeros and weight and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{means.comm.rank_label}: {_COUNTS_ZEROS.format(weight)}", stacklevel=2)

    @property
    def were_changed(self) -> bool:
        """Whether the script has changed gradients since, where `are_late_on_some`."""
        return self._late_states != self.gradient_states()

    def gradient_states(self) -> list[GradientState]:
        """What tells whether a script has changed gradients since. Local."""
        sparse = (parameter for _, parameter in self._parameters.sparse)
        return [gradient_state(p) for p in (*self._buffers.filling.slot_of, *sparse)]

    def is_mean(self, parameter: nn.Parameter) -> bool:
        """Whether ``p.grad`` is the mean of an earlier pass, maybe with a later one added."""
        grad = parameter.grad
        return grad is not None and (
            self.memory.is_mean(parameter)
            or any(
                (slot := each.slot_of.get(parameter)) is not None and slot.tensor is grad
                for each in self._buffers.sets
            )
        )

    def record_nonfinite(self, means: BucketSet) -> NonfiniteGradients | None:
        """Take note of what is not finite in them. *Collective*, if there is something.

        See `record_problem`.
        """
        found = means.nonfinite() or self._nonfinite_sparse(means)
        return self.record_problem(found, means.context.step)

    def record_problem(
        self, found: NonfiniteGradients | None, step: int
    ) -> NonfiniteGradients | None:
        """Take note of what this rank has found, or of what those have that hold other parts.

        *Collective over the ranks of the model*, which must all do the same about it.
        """
        if self._parameters.mesh.any(found is not None) and found is None:
            found = NonfiniteGradients(step, is_elsewhere=True)
        return self.nonfinite.record(found)

    def _nonfinite_sparse(self, means: BucketSet) -> NonfiniteGradients | None:
        """What is not finite among the sparse means, which are the same on all ranks. Local."""
        names = [
            name
            for name, parameter in self._parameters.sparse
            if (mean := means.sparse_means.get(parameter)) is not None
            and not mean._values().isfinite().all()
        ]
        return NonfiniteGradients(means.context.step, in_sum=names) if names else None

    def _report_norms(self, means: BucketSet) -> None:
        """Of means that were awaited, to whoever wants them. Local."""
        if self.norm_listener is not None and (norms := means.norms()) is not None:
            self.norm_listener.measured(norms)

    def _clear_absent(self, means: BucketSet) -> None:
        """Clear every ``p.grad`` that has no mean among these."""
        if not self._buffers.zero_fill:
            for slot, is_present in zip(means.slots, means.presence, strict=True):
                if not is_present:
                    slot.parameter.grad = None
        if means not in self._buffers.sets:  # of an earlier layout
            for parameter in self._buffers.filling.slot_of:
                if parameter not in means.slot_of:
                    parameter.grad = None


def assign_means(means: BucketSet, memory: GradientMemory, *, as_view: bool) -> None:
    """Wait for the means and make every dense ``p.grad`` its mean. Local.

    Buckets are copied while others arrive. ``as_view``: the slots themselves become the gradients.
    A parameter that was converted since (``model.float()``) gets a copy of its new dtype. After an
    error there are no gradients: what was copied are no means.
    """

    def is_copied(slot: Slot) -> bool:
        return not ((as_view or slot.may_lend) and slot.suits_parameter)

    try:
        for bucket in means.buckets:
            copied = [slot for slot in bucket.slots if is_copied(slot)]
            if copied:
                means.await_bucket(bucket)
                _copy(copied, memory)
        was_scaled = means.wait()
    except BaseException:
        for slot in means.slots:
            slot.parameter.grad = None
        raise
    for slot in means.slots:
        if is_copied(slot) or not _takes_gradient(slot):
            continue
        if as_view:
            slot.parameter.grad = slot.current_tensor()
        else:
            slot.lend()
    if was_scaled:
        _copy([slot for slot in means.slots if is_copied(slot)], memory)


def assign_sparse_means(means: BucketSet) -> None:
    """Make every sparse ``p.grad`` its mean, or None where there is none. Local."""
    for parameter, mean in means.sparse_means.items():
        if parameter.requires_grad or parameter.grad is not None:
            parameter.grad = mean


def spread_nonfinite(means: BucketSet) -> None:
    """Let a GradScaler of this rank leave out the step that those of other ranks leave out.

    For parts of parallel layers: GradScaler asks the other ranks itself about DTensors. Local.
    """
    for slot in means.slots:
        grad = slot.parameter.grad
        if division_of(slot.parameter) is not None and grad is not None:
            grad[(0,) * grad.dim()].fill_(float("inf"))
            return


def _copy(slots: Sequence[Slot], memory: GradientMemory) -> None:
    """Make every ``p.grad`` a copy of its slot."""
    wanted = [slot for slot in slots if _takes_gradient(slot)]
    memory.set_all([slot.parameter for slot in wanted], [slot.tensor for slot in wanted])


def _takes_gradient(slot: Slot) -> bool:
    return slot.parameter.requires_grad or slot.parameter.grad is not None
