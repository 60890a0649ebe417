"""All-reduce algorithms: plain sums over a group, sums of encoded stripes, and low-rank sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from torchmn.base import events
from torchmn.base.errors import UnsupportedError, UsageError
from torchmn.comm.codecs import Codec, Layout, PowerSGD, StripeCodec
from torchmn.comm.codecs.base import Side, aligned, anonymous_layout
from torchmn.comm.group import Group


@dataclass(eq=False)
class ReduceBlock:
    """A buffer to sum over ranks, and where the parameters are in it.

    Args:
        buffer: (n,), contiguous.
        bucket_layout: the parameters in the bucket that the buffer is, or is a part of; None if the
            parameters have no names. Used by codecs only.
        num_exact: the number of elements at the end (weights, flags) that belong to no parameter
            and are never encoded.
        start: the element of the bucket at which the buffer begins.
    """

    buffer: Tensor
    bucket_layout: Layout | None = None
    num_exact: int = 0
    start: int = 0

    @cached_property
    def layout(self) -> Layout:
        """The layout of the parameters in the buffer."""
        whole, numel = self.bucket_layout, self.buffer.numel()
        if whole is None:
            return anonymous_layout(numel - self.num_exact, self.buffer.dtype)
        if self.start == 0 and whole.end <= numel:
            return whole
        return whole.between(self.start, self.start + numel).moved(-self.start)

    @property
    def exact(self) -> Tensor:
        """A view of the last ``num_exact`` elements, which are never encoded."""
        return self.buffer[self.buffer.numel() - self.num_exact :]

    def between(self, start: int, stop: int) -> ReduceBlock:
        """The block of elements ``start`` to ``stop`` (exclusive) of the buffer, as a view."""
        num_after = self.buffer.numel() - stop
        return ReduceBlock(
            self.buffer[start:stop],
            self.bucket_layout,
            max(0, min(stop - start, self.num_exact - num_after)),
            self.start + start,
        )

    def with_buffer(self, buffer: Tensor) -> ReduceBlock:
        """The same block in another buffer, such as a copy in host memory."""
        return ReduceBlock(buffer, self.bucket_layout, self.num_exact, self.start)


class AllReduceAlgorithm(Protocol):
    """Sums a block over a group, in place, with the same bits on every rank."""

    @property
    def codec(self) -> Codec | None:
        """The codec, which holds the residuals; None for plain sums."""

    def sum_(self, group: Group, block: ReduceBlock) -> None:
        """Sum a block over the group, in place. *Collective over the group.*"""

    def prefetch_send(self, group: Group, block: ReduceBlock) -> None:
        """Announce a later sum, see `Transport.prefetch_send`. Local."""


class NativeAllReduce:
    """Sums the buffer in its own dtype with the transport's all-reduce."""

    codec: Codec | None = None

    def sum_(self, group: Group, block: ReduceBlock) -> None:
        if group.size > 1:
            group.all_reduce_(block.buffer)

    def prefetch_send(self, group: Group, block: ReduceBlock) -> None:
        if group.size > 1:
            group.transport.prefetch_send(block.buffer)


class ReduceScatterAllGather(NativeAllReduce):
    """Sums by reduce-scatter and all-gather of stripes.

    This is the all-reduce of ChainerMN's `inter_allreduce_gpu`: all-to-all, sum at the owner of
    each stripe, all-gather. Two ranks use the transport's own all-reduce.
    """

    def sum_(self, group: Group, block: ReduceBlock) -> None:
        if group.size == 2:
            group.all_reduce_(block.buffer)
        elif group.size > 1:
            group.striped_all_reduce_(block.buffer)


class CompressedAllReduce:
    """Sums of stripes encoded by a codec: the quantized all-reduce of CNTK (Seide et al. 2014).

    Every stripe is encoded for its owner. The owner adds what it receives to its own part in
    float32 (float64 buffers in float64) and encodes the sum for all ranks. Every rank, the owner
    included, uses the decoded bytes, so replicas stay bit-identical. `StripeCodec` documents when
    each of its methods is called. Each message ends with the exact elements, which every rank adds
    in rank order.
    """

    def __init__(self, codec: StripeCodec) -> None:
        self.codec: StripeCodec = codec
        self._messages: dict[tuple[Layout, int, int, int], _StripeMessages] = {}

    def sum_(self, group: Group, block: ReduceBlock) -> None:
        if group.size == 1:
            # Nothing is encoded, so residuals, such as those of a checkpoint, are added completely.
            sides: tuple[Side, ...] = ("worker", "owner")
            for side in sides:
                self.codec.flush_residual_into(block.buffer, block.layout, side)
            return
        stripes = self._stripes(group, block)
        total, wide = self._scatter(group, block, stripes)
        self._gather(group, block, stripes, total, wide)

    def prefetch_send(self, group: Group, block: ReduceBlock) -> None:
        """Does nothing: the block has to be encoded before it can be sent."""

    def _stripes(self, group: Group, block: ReduceBlock) -> _StripeMessages:
        # Buckets keep their layouts between steps, so memory is allocated in the first one only.
        key = (block.layout, group.size, group.rank, block.num_exact)
        stripes = self._messages.get(key)
        if stripes is None:
            stripes = self._messages[key] = _StripeMessages(self.codec, group, block)
        return stripes

    def _scatter(
        self, group: Group, block: ReduceBlock, stripes: _StripeMessages
    ) -> tuple[Tensor, Layout]:
        """Send each stripe to its owner; returns the sum of this rank's stripe and its layout."""
        codec, buffer, footer = self.codec, block.buffer, block.exact.view(torch.uint8)
        with events.during("encode"):
            for peer in group.others:
                message, layout = stripes.outgoing[peer], stripes.layouts[peer]
                if layout.numel:
                    codec.encode_stripe(buffer, layout, message[: stripes.nbytes[peer]])
                message[message.numel() - footer.numel() :] = footer
        group.exchange(
            [(peer, stripes.outgoing[peer]) for peer in group.others],
            [(peer, stripes.incoming[peer]) for peer in group.others],
            name=f"scatter_{codec.name}",
        )
        mine = stripes.layouts[group.rank]
        total, wide = buffer, mine
        if buffer.dtype != mine.wide_dtype:  # 16 bits are summed in 32
            total = buffer[mine.begin : mine.end].to(mine.wide_dtype)
            wide = mine.moved(-mine.begin, mine.wide_dtype)
        if mine.numel:
            # Only the owner computes this sum, and all ranks use the bytes that it encodes, so the
            # order of addition may differ between owners.
            with events.during("decode"):
                codec.flush_residual_into(total, wide)
                for peer in group.others:
                    arrived = stripes.incoming[peer][: stripes.nbytes[group.rank]]
                    codec.decode_stripe(arrived, wide, total, add=True)
        if block.num_exact:
            # Every rank adds these itself. In rank order, so that all ranks get the same bits.
            footers = [
                block.exact.clone()
                if peer == group.rank
                else stripes.incoming[peer][-footer.numel() :].clone().view(block.exact.dtype)
                for peer in range(group.size)
            ]
            torch.sum(torch.stack(footers), 0, out=block.exact)
        return total, wide

    def _gather(
        self,
        group: Group,
        block: ReduceBlock,
        stripes: _StripeMessages,
        total: Tensor,
        wide: Layout,
    ) -> None:
        """Send the encoded sum of this rank's stripe to all ranks and decode all sums."""
        codec = self.codec
        if wide.numel:
            with events.during("encode"):
                codec.encode_stripe(total, wide, stripes.sums[group.rank], "owner")
        group.exchange(
            [(peer, stripes.sums[group.rank]) for peer in group.others],
            [(peer, stripes.sums[peer]) for peer in group.others],
            name=f"gather_{codec.name}",
        )
        with events.during("decode"):
            for layout, encoded in zip(stripes.layouts, stripes.sums, strict=True):
                if layout.numel:
                    codec.decode_stripe(encoded, layout, block.buffer)


class _StripeMessages:
    """The stripes of a block and the buffers for their messages, which are reused in each step."""

    def __init__(self, codec: StripeCodec, group: Group, block: ReduceBlock) -> None:
        self.layouts = codec.split(block.layout, group.size)
        self.nbytes = [codec.stripe_nbytes(layout) for layout in self.layouts]
        footer_nbytes = block.num_exact * block.buffer.element_size()

        def memory(nbytes: int) -> Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8, device=block.buffer.device)

        mine = aligned(self.nbytes[group.rank]) + footer_nbytes
        self.outgoing = {p: memory(aligned(self.nbytes[p]) + footer_nbytes) for p in group.others}
        self.incoming = {p: memory(mine) for p in group.others}
        self.sums = [memory(nbytes) for nbytes in self.nbytes]


class LowRankAllReduce:
    """Sums matrices as low-rank products (`PowerSGD`) and other parameters exactly.

    Raises UnsupportedError for blocks that contain parts of parameters or have no names.
    """

    def __init__(self, codec: PowerSGD) -> None:
        self.codec: PowerSGD = codec

    def sum_(self, group: Group, block: ReduceBlock) -> None:
        matrices = []
        for segment in block.layout.segments:
            if segment.shape is None or not segment.is_whole:
                raise UnsupportedError(
                    f"{self.codec.name} needs whole parameters by name but got a part of "
                    f"{segment.name or 'a buffer without names'!r}. Use another route or codec."
                )
            run = block.buffer[segment.start : segment.end]
            matrices.append((segment.name, run.view(segment.shape)))
        self.codec.sum_(matrices, _GroupOfRanks(group))
        if group.size > 1 and block.num_exact:
            group.all_reduce_(block.exact)

    def prefetch_send(self, group: Group, block: ReduceBlock) -> None:
        """Does nothing: the block has to be factorized before it can be sent."""


class _GroupOfRanks:
    """Adapts a `Group` to the collectives that `PowerSGD` needs."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self._numels: list[int] = []  # of the parts of the last reduce_scatter

    def reduce_scatter(self, xs: Sequence[Tensor]) -> Tensor:
        mine = xs[self.rank].contiguous()
        self._numels = [x.numel() for x in xs]
        arrived = {peer: torch.empty_like(mine) for peer in self._group.others}
        self._group.exchange(
            [(peer, xs[peer].contiguous()) for peer in self._group.others],
            list(arrived.items()),
            name="scatter_factors",
        )
        arrived[self.rank] = mine
        # In rank order, so that the sum does not depend on which rank computes it.
        return torch.stack([arrived[peer] for peer in range(self.size)]).sum(0)

    def allgather(self, x: Tensor) -> list[Tensor]:
        parts = [x if peer == self.rank else x.new_empty(n) for peer, n in enumerate(self._numels)]
        self._group.exchange(
            [(peer, x) for peer in self._group.others],
            [(peer, parts[peer]) for peer in self._group.others],
            name="gather_factors",
        )
        return parts

    def allreduce(self, x: Tensor) -> Tensor:
        total = x.clone()
        self._group.all_reduce_(total)
        return total


def create_allreduce(codec: Codec | None) -> AllReduceAlgorithm:
    """The algorithm for a codec; for None the transport's own all-reduce.

    Raises UsageError: the codec is neither a StripeCodec nor PowerSGD.
    """
    if codec is None:
        return NativeAllReduce()
    if isinstance(codec, PowerSGD):
        return LowRankAllReduce(codec)
    if isinstance(codec, StripeCodec):
        return CompressedAllReduce(codec)
    raise UsageError(
        f"{codec!r} is neither a StripeCodec nor PowerSGD, so no all-reduce can use it."
    )
