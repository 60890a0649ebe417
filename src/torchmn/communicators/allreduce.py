"""In which form a sum crosses a group: as it is, in stripes that a codec encodes, or factorised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from torchmn.communicators.group import Group
from torchmn.compression import Codec, Layout, PowerSGD, StripeCodec
from torchmn.compression.base import Side, aligned, anonymous_layout
from torchmn.errors import UnsupportedError, UsageError


@dataclass(frozen=True, eq=False)
class Cargo:
    """What a sum carries: a buffer, and what lies in it.

    ``buffer`` is one-dimensional and contiguous. ``layout`` tells where its parameters are. The
    last ``num_exact`` elements (weights, flags) belong to none and are never encoded.
    """

    buffer: Tensor
    layout: Layout
    num_exact: int = 0

    @classmethod
    def of(cls, buffer: Tensor, layout: Layout | None = None, num_exact: int = 0) -> Cargo:
        """Without a layout the buffer is one run of elements that has no name."""
        return cls(
            buffer, layout or anonymous_layout(buffer.numel() - num_exact, buffer.dtype), num_exact
        )

    @property
    def exact(self) -> Tensor:
        """The elements that are never encoded, a view."""
        return self.buffer[self.buffer.numel() - self.num_exact :]

    def between(self, start: int, stop: int) -> Cargo:
        """Elements ``start`` to ``stop`` of the buffer as a cargo, in the same memory."""
        num_behind = self.buffer.numel() - stop
        return Cargo(
            self.buffer[start:stop],
            self.layout.between(start, stop).moved(-start),
            max(0, min(stop - start, self.num_exact - num_behind)),
        )

    def on(self, buffer: Tensor) -> Cargo:
        """The same in another buffer, such as a copy of it in other memory."""
        return replace(self, buffer=buffer)


class Wire(Protocol):
    """Sums a cargo over a group, in place, leaving the same bits on every rank."""

    @property
    def codec(self) -> Codec | None:
        """What encodes, and remembers what it owes; None for plain sums."""

    def sum_(self, group: Group, cargo: Cargo) -> None:
        """*Collective over the group.*"""

    def prefetch_send(self, group: Group, cargo: Cargo) -> None:
        """Announce a sum that will come; see `Transport.prefetch_send`. Local."""


class NativeAllReduce:
    """The buffer's own dtype, by the transport's all-reduce."""

    codec: Codec | None = None

    def sum_(self, group: Group, cargo: Cargo) -> None:
        """See `Wire.sum_`."""
        if group.size > 1:
            group.all_reduce_(cargo.buffer)

    def prefetch_send(self, group: Group, cargo: Cargo) -> None:
        """See `Wire.prefetch_send`."""
        if group.size > 1:
            group.transport.prefetch_send(cargo.buffer)


class ReduceScatterAllGather(NativeAllReduce):
    """Reduce-scatter and all-gather of stripes.

    This is the all-reduce of ChainerMN's `inter_allreduce_gpu`: all-to-all, sum at the owner of
    each stripe, all-gather. Two ranks take the transport's own, which needs one round less.
    """

    def sum_(self, group: Group, cargo: Cargo) -> None:
        """See `Wire.sum_`."""
        if group.size == 2:
            group.all_reduce_(cargo.buffer)
        elif group.size > 1:
            group.reduce_scatter_stripes_(cargo.buffer)
            group.all_gather_stripes_(cargo.buffer)


class CompressedAllReduce:
    """Stripes that a codec encodes (CNTK's quantized all-reduce, ancestors 2.2).

    Every stripe is encoded for its owner; the owner adds what arrives to its own part in float32
    (float64 buffers in float64) and encodes the sum for everybody; every rank, the owner too, keeps
    the decoded bytes: replicas stay bit-identical. `StripeCodec` says which of its methods is
    called when. Each message ends with the exact elements, which everybody adds in rank order.
    """

    def __init__(self, codec: StripeCodec) -> None:
        self.codec: StripeCodec = codec
        self._routes: dict[tuple[Layout, int, int, int], _Stripes] = {}

    def sum_(self, group: Group, cargo: Cargo) -> None:
        """See `Wire.sum_`."""
        if group.size == 1:
            sides: tuple[Side, ...] = ("worker", "owner")
            for side in sides:
                self.codec.flush_residual_into(cargo.buffer, cargo.layout, side)
            return
        stripes = self._stripes(group, cargo)
        total, wide = self._scatter(group, cargo, stripes)
        self._gather(group, cargo, stripes, total, wide)

    def prefetch_send(self, group: Group, cargo: Cargo) -> None:
        """See `Wire.prefetch_send`: it must be encoded first, in its turn."""

    def _stripes(self, group: Group, cargo: Cargo) -> _Stripes:
        key = (cargo.layout, group.size, group.rank, cargo.num_exact)
        stripes = self._routes.get(key)
        if stripes is None:
            stripes = self._routes[key] = _Stripes(self.codec, group, cargo)
        return stripes

    def _scatter(self, group: Group, cargo: Cargo, stripes: _Stripes) -> tuple[Tensor, Layout]:
        """Send each encoded stripe to its owner. Returns the sum of the own one, and its layout."""
        codec, buffer, footer = self.codec, cargo.buffer, cargo.exact.view(torch.uint8)
        for peer in stripes.others:
            message, layout = stripes.outgoing[peer], stripes.layouts[peer]
            if layout.numel:
                codec.encode_stripe(buffer, layout, message[: stripes.nbytes[peer]])
            message[message.numel() - footer.numel() :] = footer
        group.exchange(
            [(peer, stripes.outgoing[peer]) for peer in stripes.others],
            [(peer, stripes.incoming[peer]) for peer in stripes.others],
            name=f"scatter_{codec.name}",
        )
        mine = stripes.layouts[group.rank]
        total, wide = buffer, mine
        if buffer.dtype != mine.wide_dtype:  # 16 bits are summed in 32
            total = buffer[mine.begin : mine.end].to(mine.wide_dtype)
            wide = mine.moved(-mine.begin, mine.wide_dtype)
        if mine.numel:
            codec.flush_residual_into(total, wide)
            for peer in stripes.others:
                arrived = stripes.incoming[peer][: stripes.nbytes[group.rank]]
                codec.decode_stripe(arrived, wide, total, add=True)
        if cargo.num_exact:
            footers = [
                cargo.exact.clone()
                if peer == group.rank
                else stripes.incoming[peer][-footer.numel() :].clone().view(cargo.exact.dtype)
                for peer in range(group.size)
            ]
            torch.sum(torch.stack(footers), 0, out=cargo.exact)
        return total, wide

    def _gather(
        self, group: Group, cargo: Cargo, stripes: _Stripes, total: Tensor, wide: Layout
    ) -> None:
        """Send the encoded sum of the own stripe to all and decode everybody's."""
        codec = self.codec
        if wide.numel:
            codec.encode_stripe(total, wide, stripes.sums[group.rank], "owner")
        group.exchange(
            [(peer, stripes.sums[group.rank]) for peer in stripes.others],
            [(peer, stripes.sums[peer]) for peer in stripes.others],
            name=f"gather_{codec.name}",
        )
        for layout, encoded in zip(stripes.layouts, stripes.sums, strict=True):
            if layout.numel:
                codec.decode_stripe(encoded, layout, cargo.buffer)


class _Stripes:
    """The stripes of one cargo on one rank, and memory for their messages, kept between steps."""

    def __init__(self, codec: StripeCodec, group: Group, cargo: Cargo) -> None:
        self.layouts = codec.split(cargo.layout, group.size)
        self.nbytes = [codec.stripe_nbytes(layout) for layout in self.layouts]
        # Starting behind this rank, so that no rank is everybody's first.
        self.others = [(group.rank + i) % group.size for i in range(1, group.size)]
        footer_nbytes = cargo.num_exact * cargo.buffer.element_size()

        def memory(nbytes: int) -> Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8, device=cargo.buffer.device)

        mine = aligned(self.nbytes[group.rank]) + footer_nbytes
        self.outgoing = {p: memory(aligned(self.nbytes[p]) + footer_nbytes) for p in self.others}
        self.incoming = {p: memory(mine) for p in self.others}
        self.sums = [memory(nbytes) for nbytes in self.nbytes]


class LowRankAllReduce:
    """Matrices as products of thin ones (`PowerSGD`), whatever does not gain as it is.

    Only whole parameters can be factorised: a route that cuts them is refused.
    """

    def __init__(self, codec: PowerSGD) -> None:
        self.codec: PowerSGD = codec

    def sum_(self, group: Group, cargo: Cargo) -> None:
        """See `Wire.sum_`."""
        matrices = []
        for segment in cargo.layout.segments:
            if segment.shape is None or not segment.is_whole:
                raise UnsupportedError(
                    f"{self.codec.name} needs whole parameters by name, and here is a part of "
                    f"{segment.name or 'a buffer without names'!r}. Use another route or codec."
                )
            run = cargo.buffer[segment.start : segment.end]
            matrices.append((segment.name, run.view(segment.shape)))
        self.codec.sum_(matrices, _GroupOfRanks(group))
        if group.size > 1 and cargo.num_exact:
            group.all_reduce_(cargo.exact)

    def prefetch_send(self, group: Group, cargo: Cargo) -> None:
        """See `Wire.prefetch_send`: it must be factorised first, in its turn."""


class _GroupOfRanks:
    """A group as aggregating codecs see it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self._numels: list[int] = []  # of the parts of the last reduce_scatter

    def reduce_scatter(self, xs: Sequence[Tensor]) -> Tensor:
        """See `power_sgd.Ranks`."""
        mine = xs[self.rank].contiguous()
        self._numels = [x.numel() for x in xs]
        others = [peer for peer in range(self.size) if peer != self.rank]
        arrived = {peer: torch.empty_like(mine) for peer in others}
        self._group.exchange(
            [(peer, xs[peer].contiguous()) for peer in others],
            list(arrived.items()),
            name="scatter_factors",
        )
        arrived[self.rank] = mine
        return torch.stack([arrived[peer] for peer in range(self.size)]).sum(0)

    def allgather(self, x: Tensor) -> list[Tensor]:
        """See `power_sgd.Ranks`."""
        parts = [x if peer == self.rank else x.new_empty(n) for peer, n in enumerate(self._numels)]
        others = [peer for peer in range(self.size) if peer != self.rank]
        self._group.exchange(
            [(peer, x) for peer in others],
            [(peer, parts[peer]) for peer in others],
            name="gather_factors",
        )
        return parts

    def allreduce(self, x: Tensor) -> Tensor:
        """See `power_sgd.Ranks`."""
        total = x.clone()
        self._group.all_reduce_(total)
        return total


def create_allreduce(codec: Codec | None) -> Wire:
    """The wire for a codec; None is the transport's own all-reduce."""
    if codec is None:
        return NativeAllReduce()
    if isinstance(codec, PowerSGD):
        return LowRankAllReduce(codec)
    if isinstance(codec, StripeCodec):
        return CompressedAllReduce(codec)
    raise UsageError(f"{codec!r} is neither a StripeCodec nor PowerSGD: no wire can carry it.")
