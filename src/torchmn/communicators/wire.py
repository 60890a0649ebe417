"""In which form a sum crosses a group: as it is, or in stripes that a codec encodes.

The last ``num_exact`` elements of a buffer (weights, flags) always travel unencoded.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from torchmn.communicators.group import Group
from torchmn.compression import StripeCodec


class Wire(Protocol):
    """Sums a buffer over a group, in place, leaving the same bits on every rank."""

    def sum_(self, group: Group, buffer: Tensor, num_exact: int) -> None:
        """*Collective over the group.* ``buffer`` is one-dimensional and contiguous."""


class PlainWire:
    """The buffer's own dtype, by the transport's all-reduce."""

    def sum_(self, group: Group, buffer: Tensor, num_exact: int) -> None:
        """See `Wire.sum_`."""
        if group.size > 1:
            group.all_reduce_(buffer)


class StripedWire:
    """Reduce-scatter and all-gather of stripes, each encoded by a codec if there is one.

    Without a codec this is the all-reduce of ChainerMN's `inter_allreduce_gpu`: all-to-all, sum
    at the owner of each stripe, all-gather. With a codec every stripe is encoded for its owner,
    owners sum in float32 (float64 buffers in float64) and encode the sum for everybody, and every
    rank, the owner too, keeps the decoded bytes: replicas stay bit-identical (CNTK's quantized
    all-reduce, ancestors 2.2).
    """

    def __init__(self, codec: StripeCodec | None = None) -> None:
        self.codec = codec

    def sum_(self, group: Group, buffer: Tensor, num_exact: int) -> None:
        """See `Wire.sum_`."""
        if group.size == 1:
            return
        if self.codec is None:
            group.reduce_scatter_stripes_(buffer)
            group.all_gather_stripes_(buffer)
            return
        payload, exact = buffer.tensor_split([buffer.numel() - num_exact])
        pieces = list(payload.tensor_split(group.size))
        encoded = self._scatter(group, self.codec, pieces, exact)
        self._gather(group, self.codec, pieces, encoded)

    def _scatter(
        self, group: Group, codec: StripeCodec, pieces: list[Tensor], exact: Tensor
    ) -> Tensor:
        """Send each encoded stripe, with the exact elements behind it, to its owner.

        Returns the encoded sum of the caller's stripe; ``exact`` is summed in place.
        """
        others = [peer for peer in range(group.size) if peer != group.rank]
        mine = pieces[group.rank]
        footer = exact.view(torch.uint8)
        sends = []
        for peer in others:
            nbytes = codec.encoded_nbytes(pieces[peer].numel(), pieces[peer].dtype)
            message = footer.new_empty(nbytes + footer.numel())
            codec.encode(pieces[peer], message[:nbytes])
            message[nbytes:] = footer
            sends.append((peer, message))
        own_nbytes = codec.encoded_nbytes(mine.numel(), mine.dtype)
        recvs = [(peer, footer.new_empty(own_nbytes + footer.numel())) for peer in others]
        group.exchange(sends, recvs, name=f"scatter_{codec.name}")

        own = footer.new_empty(own_nbytes)
        codec.encode(mine, own)
        arrived = dict(recvs)
        wide = torch.float64 if mine.dtype == torch.float64 else torch.float32
        total = torch.zeros(mine.numel(), dtype=wide, device=mine.device)
        decoded = torch.empty_like(total)
        footers = torch.zeros_like(exact)
        for peer in range(group.size):
            is_own = peer == group.rank
            codec.decode(own if is_own else arrived[peer][:own_nbytes], decoded)
            total += decoded
            tail = footer if is_own else arrived[peer][own_nbytes:]
            footers += tail.clone().view(exact.dtype)
        exact.copy_(footers)
        codec.encode(total, own)
        return own

    def _gather(self, group: Group, codec: StripeCodec, pieces: list[Tensor], own: Tensor) -> None:
        """Send the encoded sum of the caller's stripe to all and decode everybody's."""
        others = [peer for peer in range(group.size) if peer != group.rank]
        recvs = [
            (peer, own.new_empty(codec.encoded_nbytes(pieces[peer].numel(), pieces[peer].dtype)))
            for peer in others
        ]
        group.exchange([(peer, own) for peer in others], recvs, name=f"gather_{codec.name}")
        for peer, message in [*recvs, (group.rank, own)]:
            codec.decode(message, pieces[peer])


def create_wire(codec: StripeCodec | None) -> Wire:
    """The wire for a codec; None is the transport's own all-reduce."""
    return PlainWire() if codec is None else StripedWire(codec)
