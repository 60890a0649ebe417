"""Packing gradients into buckets while backward still runs, as soon as they are final.

A gradient is final when autograd has called our hook after accumulating it and no hook of the
script that runs later can change it. The small gradients of a bucket are packed together once all
of them are final: a bucket whose gradients arrive in the order of the previous pass costs one call
of Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NoReturn

from torchmn.base import events
from torchmn.base.errors import UnsupportedError
from torchmn.exchange.buckets import Bucket, Slot
from torchmn.exchange.gradient_exchange import GradientExchange
from torchmn.exchange.packing import Packing
from torchmn.exchange.parameter_hook import GradientHooks


class EarlyPacking:
    """Fills the buckets of one exchange after another. Every method is local.

    Args:
        exchange: the exchanges whose buckets are filled.
        hooks: the hooks on its parameters.
    """

    def __init__(self, exchange: GradientExchange, hooks: GradientHooks) -> None:
        self._exchange, self._hooks = exchange, hooks
        self._rank_label = exchange.comm.rank_label

    def begin(self) -> None:
        """Prepare the hooks, as a pass has begun whose gradients can be packed early."""
        exchange = self._exchange
        for bucket in exchange.filling.buckets:
            self._hooks.note_in(bucket.arrivals)

    def end(self) -> None:
        """Restore the hooks at the end of a pass.

        Raises UnsupportedError: a gradient was accumulated again after it was packed.
        """
        self._hooks.call_again()
        exchange = self._exchange
        # A hook in C only appends: that a gradient came twice may be noticed no earlier than here.
        for bucket in exchange.filling.buckets:
            self._refuse_repeated(bucket)

    def arrived(self, slot: Slot) -> None:
        """Pack the gradients that are final, now that the one of ``slot`` was accumulated.

        Buckets that are full are sent, in order.
        """
        bucket = slot.bucket
        if slot.is_small:
            bucket.arrivals.note(slot.parameter)
            self._pack_small(bucket)
        elif slot.is_packed:
            self._refuse(slot)
        elif not self._hooks.have_later((slot.number,)):
            self._pack_early(bucket, [slot])

    def pack_rest(self) -> None:
        """Pack all remaining slots at the end of a pass, also those without a gradient."""
        packing = self._exchange.filled
        for bucket in packing.buckets.buckets:
            if bucket.num_packed < len(bucket.slots):
                self._pack(packing, bucket, [slot for slot in bucket.slots if not slot.is_packed])

    def _pack_small(self, bucket: Bucket) -> None:
        """Pack the small gradients of a bucket if all of them are known to be final."""
        arrivals = bucket.arrivals
        if len(arrivals) < len(bucket.small) or not arrivals:
            return
        if bucket.small[0].is_packed:
            self._refuse_repeated(bucket)
        elif arrivals.are_complete and not self._hooks.have_later(arrivals.numbers.values()):
            self._pack_early(bucket, bucket.small)

    def _pack_early(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        # Inside a hook of autograd: the pass waits, and computes the next gradient after this.
        packing, as_view = self._exchange.filled, self._exchange.as_view
        for observer in events.observers:
            observer.phase("pack", begins=True)
        try:
            means = self._pack(packing, bucket, slots)
        finally:
            for observer in events.observers:
                observer.phase("pack", begins=False)
        # What was copied is freed: the next layer's gradient then takes its memory.
        for slot in slots:
            parameter, tensor = slot.parameter, slot.tensor
            if as_view:
                parameter.grad = tensor
            elif parameter.grad is not tensor and slot not in means:
                parameter.grad = None
        behind = packing.sums.next_bucket
        if behind is not bucket:  # gradients may have come in another order than before
            self._pack_small(behind)

    def _pack(self, packing: Packing, bucket: Bucket, slots: Sequence[Slot]) -> Collection[Slot]:
        """Write gradients into their bucket.

        Returns the slots whose gradient was added to an earlier mean; none where such a mean can
        only be in its slot.
        """
        exchange = self._exchange
        means = () if exchange.is_plain else exchange.note_own(slots)
        packing.is_accumulating |= bool(means)
        packing.pack(bucket, slots)
        return means

    def _refuse_repeated(self, bucket: Bucket) -> None:
        """Raise if a small gradient was accumulated again after it was packed."""
        arrivals = bucket.arrivals
        if len(arrivals) > len(bucket.small) and bucket.small[0].is_packed:
            [(repeated, _)] = Counter(map(id, arrivals)).most_common(1)
            self._refuse(next(slot for slot in bucket.small if id(slot.parameter) == repeated))

    def _refuse(self, slot: Slot) -> NoReturn:
        raise UnsupportedError(
            f"{self._rank_label}: backward computed the gradient of '{slot.name}' "
            "twice in one pass, as torch.utils.checkpoint with use_reentrant=True does. Use "
            "use_reentrant=False."
        )
