"""Filling an exchange: this rank's gradients are written into its buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchmn.base import events
from torchmn.base.errors import UnsupportedError
from torchmn.exchange.agreements.base import PassContext
from torchmn.exchange.agreements.weights import WeightAgreement
from torchmn.exchange.bucket_set import BucketSet
from torchmn.exchange.buckets import Bucket, Slot
from torchmn.exchange.finiteness import sum_of
from torchmn.exchange.sums import Sums


class Packing:
    """The first half of an exchange: filling its buckets. *Collective*; creating it never waits.

    Gradients are multiplied by ``weight / (size * scale)`` when they are packed, and the footer
    holds the weight itself: with weights w_i the mean is the sum times
    ``size * scale / sum(w_i)``, and with ``reduction="sum"`` the result is the sum times
    ``size * scale``.

    Call `pack` for all slots and then `finish`, or `write`, which does both; `sums` then starts the
    remaining sums, or performs them.

    Args:
        buckets: the buckets to fill.
        context: what this rank contributes.
        scale: the `weight_scale`, the same on all ranks; None to agree on one, for which
            `await_scale` waits. A codec with residuals, or a scale of None, has the ranks' weights
            summed before the buckets.
    """

    def __init__(self, buckets: BucketSet, context: PassContext, scale: float | None) -> None:
        self.buckets, self.context = buckets, context
        self._comm, self._finiteness = buckets.comm, buckets.finiteness
        self.is_accumulating = False
        """Whether a gradient was added to the mean of an earlier exchange."""
        self._own_factor = 0.0
        self._is_on_gpu, self._is_on_device = buckets.is_on_gpu, buckets.is_deferred
        self._streams = buckets.streams
        buckets.restart()
        buckets.footer.begin(context)
        self.sums = Sums(buckets, context)
        codec = buckets.codec
        if scale is None or (codec is not None and codec.keeps_residuals):
            self.sums.agreement = WeightAgreement(
                buckets.comm,
                context.weight,
                is_active=context.is_active,
                scale=scale,
                then=self.sums.weights_are_known,
            )
        if scale is not None:
            self._set_scale(scale)

    def await_scale(self, scale: float | None) -> float:
        """The `weight_scale` of this exchange; waits for the other ranks if ``scale`` is None."""
        if scale is None:
            agreement = self.sums.agreement
            scale = 1.0 if agreement is None else agreement.scale
            self._set_scale(scale)
        return scale

    def _set_scale(self, scale: float) -> None:
        self.sums.scale = scale
        self._own_factor = self.context.weight / (self._comm.size * scale)

    def pack(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        """Write the gradients of some slots of one bucket, and start the sums of full buckets.

        Zeros are written where there is no gradient. Small gradients are written together.
        """
        factor = self._own_factor
        small: list[Tensor] = []
        grads: list[Tensor] = []
        for slot in slots:
            grad, tensor = slot.parameter.grad, slot.tensor
            if tensor.data_ptr() != slot.address:
                tensor = slot.current_tensor()
            slot.is_packed = True
            if grad is not None:
                if grad.requires_grad or grad.layout is not torch.strided:
                    self._refuse(slot.name, grad)
                slot.has_gradient = True
                if grad is tensor:  # an earlier mean in its slot, to which autograd has added
                    self.is_accumulating = True
            if grad is None or factor == 0.0:  # even NaN, times the weight 0, is nothing
                tensor.zero_()
            elif not slot.is_small:
                self._write_large(bucket, tensor, grad)
            elif grad is not tensor:
                small.append(tensor)
                grads.append(grad)
        # Autograd runs a layer's backward on the stream of its forward: a bucket may have several.
        if self._is_on_device:
            streams = bucket.arrivals.streams
            streams.add(self._streams.current())
        if grads:
            if len(bucket.arrivals.streams) > 1:
                self._join_streams(bucket, grads)
            torch._foreach_copy_(small, grads)
        bucket.num_packed += len(slots)
        if bucket.num_packed == len(bucket.slots):
            self._complete(bucket)

    def _write_large(self, bucket: Bucket, tensor: Tensor, grad: Tensor) -> None:
        factor = self._own_factor
        if grad.data_ptr() != tensor.data_ptr():
            torch.mul(grad, factor, out=tensor)
        elif factor != 1.0:
            tensor.mul_(factor)
        if not self._is_on_gpu:  # at once, while the values are in the cache
            bucket.totals.append(sum_of(tensor))

    def _complete(self, bucket: Bucket) -> None:
        """Scale and check a bucket whose gradients are all written, and start full buckets."""
        if len(bucket.arrivals.streams) > 1:
            self._join_streams(bucket)
        # Small gradients were copied without the factor: neighbours are scaled as one tensor.
        if self._own_factor not in (0.0, 1.0) and bucket.runs:
            torch._foreach_mul_(bucket.runs, self._own_factor)
        if not self._is_on_gpu:
            for run in bucket.runs:
                bucket.totals.append(sum_of(run))
        self._finiteness.check(bucket)
        for observer in events.observers:
            observer.exchange(self.buckets.comm, bucket, bucket.index, "ready")
        if self._is_on_device:
            # The sum may be started later, from another stream: by the hook of another bucket.
            bucket.written = self._streams.record()
        if self.buckets.overlaps_backward:
            self.sums.start_full()

    def _join_streams(self, bucket: Bucket, grads: Sequence[Tensor] = ()) -> None:
        """Let the current stream wait for all others that have computed gradients of a bucket.

        ``grads`` are about to be read on the current stream: their memory is kept until it has done
        so, whichever stream they were allocated on.
        """
        current = self._streams.current()
        for stream in bucket.arrivals.streams:
            if stream != current:
                self._streams.wait_for(stream)
        for grad in grads:
            self._streams.keep(grad)

    def write(self, write: Callable[[Slot, float], None]) -> None:
        """Write all slots, then `finish`.

        ``write(slot, factor)`` fills one slot with its values times ``factor``.
        """
        for slot in self.buckets.slots:
            if self._own_factor == 0.0:  # nothing, even where the values are NaN
                slot.tensor.zero_()
            else:
                write(slot, self._own_factor)
            if not self._is_on_gpu:
                bucket = slot.bucket
                bucket.totals.append(sum_of(slot.tensor))
        for bucket in self.buckets.buckets:
            self._finiteness.check(bucket)
        self.finish()

    def _refuse(self, name: str, grad: Tensor) -> None:
        rank_label = self._comm.rank_label
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"{rank_label}: the gradient of '{name}' is sparse ({grad.layout}), and "
                "its layer is not one whose gradients are known to be: nn.Embedding and "
                "nn.EmbeddingBag with sparse=True. Use one of these, or dense gradients "
                "(sparse=False)."
            )
        raise UnsupportedError(
            f"{rank_label}: backward(create_graph=True): every p.grad becomes a mean "
            "over ranks, which has no graph and cannot be differentiated again. For second "
            "derivatives use torch.autograd.grad(loss, parameters, create_graph=True)."
        )

    def finish(self) -> None:
        """Write this rank's part of the footer, once all slots are packed."""
        buckets = self.buckets
        if not buckets.buckets:
            return
        are_all_present = self.context.is_active
        for slot in buckets.slots:
            are_all_present &= slot.has_gradient
        self.sums.are_all_present = are_all_present
        buckets.footer.write(self.context)

    def give_up(self) -> Sums:
        """Perform the remaining sums with zeros; an agreement in the footer says why."""
        buckets = self.buckets
        # Gradients that lie in their slots keep their values, while zeros are summed there.
        held = [slot for slot in buckets.slots if slot.parameter.grad is slot.tensor]
        buckets.move_to_new_memory([slot for slot in held if slot.may_lend])
        for slot in held:
            if not slot.may_lend:  # memory that ranks share stays where it is
                slot.parameter.grad = slot.tensor.clone()
        self.sums.clear_remaining()
        nothing = replace(self.context, weight=0.0, num_samples=0.0, is_active=False)
        self.context = self.sums.context = nothing
        self.finish()
        return self.sums.reduce_remaining()
