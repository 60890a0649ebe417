"""From the means in the buckets to every ``p.grad``."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.comm.local_tensors import division_of
from torchmn.exchange.bucket_set import BucketSet
from torchmn.exchange.buckets import Slot
from torchmn.exchange.gradient_memory import GradientMemory


def assign_means(
    means: BucketSet, memory: GradientMemory, *, as_view: bool, is_current: bool
) -> None:
    """Wait for the means and make every dense ``p.grad`` its mean. Local.

    Buckets are copied while others arrive. ``as_view``: the slots themselves become the gradients.
    ``is_current``: parameters have the dtypes and devices of their slots; one that was converted
    since (``model.float()``) gets a copy of its new dtype. After an error there are no gradients:
    what was copied are no means.
    """
    lent: list[Slot] = []
    copied: list[Slot] = []
    try:
        for bucket in means.buckets:
            num_copied = len(copied)
            for slot in bucket.slots:
                may_lend = (as_view or slot.may_lend) and (is_current or slot.suits_parameter)
                (lent if may_lend else copied).append(slot)
            if len(copied) > num_copied:
                means.await_bucket(bucket)
                _copy(copied[num_copied:], memory)
        was_scaled = means.wait()
    except BaseException:
        for slot in means.slots:
            slot.parameter.grad = None
        raise
    for slot in lent:
        parameter = slot.parameter
        if not parameter.requires_grad and parameter.grad is None:
            continue
        if slot.tensor.data_ptr() != slot.address:
            slot.current_tensor()
        if as_view or slot.unused is not None:
            parameter.grad = slot.tensor
        else:
            slot.lend()
    if was_scaled and copied:
        _copy(copied, memory)


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
