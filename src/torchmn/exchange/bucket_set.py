"""The memory of an exchange: a set of buckets, which exchanges use one after another."""

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
    """Buckets, the slots in them, and what ranks must have in common where they are summed.

    A `Packing` fills them, its `Sums` are made in them, and `Means` read them. One exchange ends
    before the next one begins in the same set.
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
        """In the order of the memory."""
        self.slots = list(self.slot_of.values())
        self.slot_at: list[Slot | None] = []
        """By the numbers of the parameters, see `number`."""
        self.what = what
        self.reduction: Reduction = reduction
        self.is_on_gpu = any(bucket.buffer.device.type != "cpu" for bucket in buckets)
        self.is_narrow = self.codec is not None or any(
            bucket.buffer.dtype == torch.float16 for bucket in buckets
        )
        """Whether values beyond float16's range would be lost on the way."""
        engine = comm.engine
        is_on_device = any(b.buffer.device.type == engine.device.type for b in buckets[-1:])
        self.streams = engine.streams if is_on_device else HostStreams()
        self.is_deferred = not self.streams.is_host
        """Whether the host learns later what sums say about the ranks: it waits for no device."""
        self.footer = footer or Footer(comm)
        """What ranks must have in common."""
        self.footer.streams = self.streams
        if buckets:
            self.footer.values = buckets[-1].exact
        finite = self.footer.finite
        self.finiteness = finite.finiteness
        presence = self.footer.find(Presence)
        if presence is not None:
            presence.slots = self.slots

    def number(self, parameters: Sequence[nn.Parameter]) -> None:
        """Fill `slot_at`: by the position of a parameter among these. Local."""
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
        """Forget what was packed. Local."""
        for slot in self.slots:
            slot.is_packed = slot.has_gradient = False
        current_stream = self.streams.current if self.is_deferred else None
        for bucket in self.buckets:
            bucket.num_packed = 0
            bucket.totals.clear()
            bucket.arrivals.restart(current_stream)
        self.leave_lent()

    def leave_lent(self) -> None:
        """Leave memory that a script still uses to it and continue in new memory. Local."""
        used = in_use(self.slots)
        for slot in self.move_to_new_memory(used) if used else ():
            grad = slot.parameter.grad
            if grad is not None:
                slot.tensor.copy_(grad)
                slot.lend()

    def move_to_new_memory(self, slots: Sequence[Slot]) -> list[Slot]:
        """Move the buckets of these slots, and so all slots in them; every ``p.grad`` stays.

        Returns the moved slots whose tensor was ``p.grad``.
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
