"""Assigning the means of an exchange to ``p.grad``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmn.comm.local_tensors import division_of
from torchmn.exchange.agreements.facts import Presence
from torchmn.exchange.buckets import Slot
from torchmn.exchange.gradient_memory import GradientMemory
from torchmn.exchange.sums import Sums


class Means:
    """The means that the sums of an exchange become. Every method is local."""

    def __init__(self, sums: Sums) -> None:
        self._sums, self._buckets, self._footer = sums, sums.buckets, sums.footer

    def assign(
        self, memory: GradientMemory, *, as_view: bool, is_current: bool, is_on_device: bool
    ) -> None:
        """Wait for the means and set every dense ``p.grad`` to its mean.

        Args:
            memory: where means are copied that cannot stay in their buckets; buckets that have
                arrived are copied while others are under way.
            as_view: whether the slots themselves become the gradients.
            is_current: whether parameters have the dtypes and devices of their slots. A parameter
                that was converted since (``model.float()``) gets a copy in its new dtype.
            is_on_device: see `Sums.scale_on_device`.

        After an error every ``p.grad`` is None: what was copied are sums, not means.
        """
        sums = self._sums
        lent: list[Slot] = []
        copied: list[Slot] = []
        try:
            for bucket in self._buckets.buckets:
                num_copied = len(copied)
                for slot in bucket.slots:
                    may_lend = (as_view or slot.may_lend) and (is_current or slot.suits_parameter)
                    (lent if may_lend else copied).append(slot)
                if len(copied) > num_copied:
                    sums.await_bucket(bucket)
                    _copy(copied[num_copied:], memory)
            was_scaled = sums.scale_on_device() if is_on_device else sums.wait()
        except BaseException:  # also of Ctrl-C, after which some gradients would be sums
            for slot in self._buckets.slots:
                slot.parameter.grad = None
            raise
        for slot in lent:
            parameter = slot.parameter
            # A frozen parameter keeps None: with a gradient, even of zeros, optimizers change it.
            if not parameter.requires_grad and parameter.grad is None:
                continue
            if slot.tensor.data_ptr() != slot.address:
                slot.current_tensor()
            if as_view or slot.unused is not None:
                parameter.grad = slot.tensor
            else:
                slot.lend()
        # The copies above were made of sums: the factor was not known before the last bucket.
        if was_scaled and copied:
            _copy(copied, memory)

    def assign_sparse(self) -> None:
        """Set every sparse ``p.grad`` to its mean, or to None where there is none."""
        sparse_means = self._sums.sparse_means
        for parameter, mean in sparse_means.items():
            if parameter.requires_grad or parameter.grad is not None:
                parameter.grad = mean

    @property
    def are_present(self) -> list[bool]:
        """Whether any rank had a gradient, for each slot; empty if ranks do not exchange that."""
        self._sums.read()
        presence = self._footer.find(Presence)
        return [] if presence is None else presence.are_present

    def clear_absent(self) -> None:
        """Set every ``p.grad`` that has no mean to None."""
        are_present = self.are_present
        if False in are_present:
            for slot, is_present in zip(self._buckets.slots, are_present, strict=True):
                if not is_present:
                    slot.parameter.grad = None

    def spread_nonfinite(self) -> None:
        """Write an infinity into a gradient, so that this rank's GradScaler skips the step as well.

        Used if only the parts of parallel layers on other ranks were not finite; for DTensors
        GradScaler asks the other ranks itself.
        """
        for slot in self._buckets.slots:
            grad = slot.parameter.grad
            if division_of(slot.parameter) is not None and grad is not None:
                grad[(0,) * grad.dim()].fill_(float("inf"))
                return

    def copies(self) -> dict[str, Tensor | None]:
        """Return copies of the means by name, to be saved; None where no rank had a gradient."""
        slots = self._buckets.slots
        copies: dict[str, Tensor | None] = {slot.name: slot.tensor.clone() for slot in slots}
        for slot, is_present in zip(slots, self.are_present, strict=False):
            if not is_present:
                copies[slot.name] = None
        return copies


def _copy(slots: Sequence[Slot], memory: GradientMemory) -> None:
    """Set every ``p.grad`` to a copy of its slot, unless the parameter is frozen without one."""
    wanted = [slot for slot in slots if _takes_gradient(slot)]
    memory.set_all([slot.parameter for slot in wanted], [slot.tensor for slot in wanted])


def _takes_gradient(slot: Slot) -> bool:
    return slot.parameter.requires_grad or slot.parameter.grad is not None
