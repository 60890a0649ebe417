"""The memory of exchanges: a set of buckets, used by one exchange after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from torchmn.comm import Communicator
from torchmn.comm.allreduce import AllReduceAlgorithm
from torchmn.comm.streams import HostStreams
from torchmn.exchange.agreements.facts import Presence
from torchmn.exchange.agreements.footer import Footer
from torchmn.exchange.buckets import Bucket, Slot
from torchmn.exchange.gradient_memory import in_use

Reduction = Literal["mean", "sum"]
"""How the ranks' gradients are combined."""


class BucketSet:
    """Buckets, their slots, and the footer that is summed with them.

    A `Packing` fills the buckets, its `Sums` are computed in place, and `Means` read the results.
    One exchange ends before the next one begins in the same set.
    """

    def __init__(
        self,
        comm: Communicator,
        algorithm: AllReduceAlgorithm,
        buckets: list[Bucket],
        *,
        footer: Footer | None = None,
        what: str = "gradients",
        reduction: Reduction = "mean",
    ) -> None:
        self.comm, self.route = comm, comm.route
        self.overlaps_backward = comm.route.overlaps_backward
        self.algorithm = algorithm
        self.codec = algorithm.codec
        self.buckets = buckets
        self.slot_of: dict[nn.Parameter, Slot] = {
            slot.parameter: slot for bucket in buckets for slot in bucket.slots
        }
        """The slots by parameter, in the order of the memory."""
        self.slots = list(self.slot_of.values())
        self.slot_at: list[Slot | None] = []
        """The slots by the numbers of their parameters, see `number`; None if it has no slot."""
        self.what = what
        self.reduction: Reduction = reduction
        self.is_on_gpu = any(bucket.buffer.device.type != "cpu" for bucket in buckets)
        self.is_narrow = self.codec is not None or any(
            bucket.buffer.dtype == torch.float16 for bucket in buckets
        )
        """Whether values beyond float16's range would be lost in transfer."""
        engine = comm.engine
        # The last bucket holds the footer: its device decides whether the host would have to wait.
        is_on_device = any(b.buffer.device.type == engine.device.type for b in buckets[-1:])
        self.streams = engine.streams if is_on_device else HostStreams()
        self.is_deferred = not self.streams.is_host
        """Whether the host reads the footer later, so as not to wait for the device."""
        self.footer = footer or Footer(comm)
        """The agreements of the ranks, summed with the last bucket."""
        self.footer.streams = self.streams
        if buckets:  # the elements that no codec encodes
            self.footer.values = buckets[-1].exact
        finite = self.footer.finite
        self.finiteness = finite.finiteness
        presence = self.footer.find(Presence)
        if presence is not None:
            presence.slots = self.slots

    def number(self, parameters: Sequence[nn.Parameter]) -> None:
        """Number the slots by the position of their parameter in ``parameters``. Local."""
        self.slot_at = [self.slot_of.get(parameter) for parameter in parameters]
        for number, slot in enumerate(self.slot_at):
            if slot is not None:
                slot.number = number
        for bucket in self.buckets:
            bucket.arrivals.expect({id(slot.parameter): slot.number for slot in bucket.small})

    def warm_up(self) -> None:
        """Compile what the codec needs now, so that no step has to."""
        if self.codec is None or self.comm.size == 1:
            return
        layouts = {bucket.layout.dtype: bucket.layout for bucket in self.buckets}
        for layout in layouts.values():
            if layout.numel:
                self.codec.warm_up(layout, self.buckets[0].buffer.device)

    def restart(self) -> None:
        """Prepare all slots and buckets for the next exchange. Local."""
        for slot in self.slots:
            slot.is_packed = slot.has_gradient = False
        current_stream = self.streams.current if self.is_deferred else None
        for bucket in self.buckets:
            bucket.num_packed = 0
            bucket.totals.clear()
            bucket.arrivals.restart(current_stream)
        self.leave_lent()

    def leave_lent(self) -> None:
        """Give buckets new memory where the script still uses the old one. Local."""
        used = in_use(self.slots)
        for slot in self.move_to_new_memory(used) if used else ():
            # These only share a bucket with a slot in use: their p.grad, to which the next pass
            # may add, moves with it.
            grad = slot.parameter.grad
            if grad is not None:
                slot.tensor.copy_(grad)
                slot.lend()

    def move_to_new_memory(self, slots: Sequence[Slot]) -> list[Slot]:
        """Give the buckets of these slots new memory; every ``p.grad`` stays in the old one. Local.

        All slots of such a bucket move. Returns those whose tensor was ``p.grad``.
        """
        lent = []
        for bucket in dict.fromkeys(slot.bucket for slot in slots):
            lent += [slot for slot in bucket.slots if slot.parameter.grad is slot.tensor]
            new = torch.zeros_like(bucket.buffer).untyped_storage()
            for tensor in (
                bucket.buffer,
                *([self.footer.values] if bucket is self.buckets[-1] else []),
            ):
                tensor.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())
            bucket.follow()
        return lent
