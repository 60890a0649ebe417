"""Residuals: for each parameter, the accumulated error of encoding.

They are stored by the name of the parameter and the position in it, separately for the errors of
this rank as a worker and as the owner of stripes. The layout of buckets and stripes may change
between two exchanges; residuals follow. The residuals of an exchange become valid when it ends: if
its result is discarded, so are they.

Values are in the unit of the exchange that wrote them, whose sum was ``scale`` times the mean:
``values / scale`` is what the mean has lost, whatever the weights were. An exchange with another
scale converts the values that it uses by the ratio; with equal scales no bit changes.

When the layout changes, the block of an old stripe is split into pieces, one per segment, and a new
stripe adds up the pieces that overlap it. Pieces that it does not cover stay unassigned:

    parameter w       0        100       200       300
    old stripe        [=========|=========]            its block is detached: one piece, 0 to 200
    new stripe                 [==========|=========]  takes 100 to 200, zeros after it
    unassigned        [=========]                      0 to 100, until another stripe takes it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.comm.codecs.base import IsValid, Side
from torchmn.comm.codecs.layout import Layout, Segment

State = dict[str, Any]


class ResidualBlock:
    """The residuals of a stripe: ``current`` (span,) and ``pending`` (span,), its replacement."""

    def __init__(self, stripe: Layout, device: torch.device, scale: float) -> None:
        self.stripe = stripe
        self.scale = scale
        self.current = torch.zeros(stripe.span, dtype=stripe.wide_dtype, device=device)
        self.pending = torch.zeros_like(self.current)
        self.is_written = False
        self.is_flushed = False
        """Whether all residuals were added to values that are used without being encoded."""

    def convert(self, scale: float) -> None:
        """Convert the current residuals to the unit of an exchange with this scale."""
        if scale != self.scale:
            self.current.mul_(scale / self.scale)
            self.scale = scale

    def part(self, position: int) -> Tensor:
        """A view of the current residuals of one segment."""
        segment = self.stripe.segments[position]
        start = segment.start - self.stripe.begin
        return self.current[start : start + segment.numel]


@dataclass(frozen=True)
class _Piece:
    """Residuals of consecutive elements of a parameter that are not assigned to a stripe."""

    offset: int
    values: Tensor
    scale: float


class Residuals:
    """All residuals of one rank. Local."""

    def __init__(self) -> None:
        self.scale = 1.0
        """The factor between the sum and the mean of the current exchange."""
        self._blocks: dict[tuple[Side, Layout], ResidualBlock] = {}
        self._unassigned: dict[tuple[Side, str], list[_Piece]] = {}
        """Pieces that were loaded or are from an earlier layout, until a stripe takes them."""
        self._without: set[tuple[Side, Layout]] = set()
        """Stripes that are known to have no residuals."""

    def block(
        self, side: Side, stripe: Layout, device: torch.device, *, is_owner: bool = True
    ) -> ResidualBlock:
        """The residuals of a stripe in the unit of this exchange; zeros if there are none yet.

        A worker that does not own the stripe also takes its residuals as an earlier owner, which
        are missing from the sum as well.
        """
        block = self._blocks.get((side, stripe))
        if block is None:
            # Its layout may leave pieces unassigned that other stripes then have to take.
            self._without.clear()
            sides: tuple[Side, ...] = (side,) if is_owner else ("worker", "owner")
            block = ResidualBlock(stripe, device, self.scale)
            for each in sides:
                self._detach(each, stripe)
                for position, segment in enumerate(stripe.segments):
                    self._take(each, segment.name, segment.offset, block.part(position))
            self._blocks[side, stripe] = block
        block.convert(self.scale)
        return block

    def flush_into(self, span: Tensor, side: Side, stripe: Layout) -> None:
        """Add the residuals of a stripe to its values ``span``, which are not encoded.

        The residuals are zero afterwards. Most stripes have none: only those that had another owner
        or another layout before.
        """
        key = (side, stripe)
        if key in self._without:
            return
        if key not in self._blocks:
            self._detach(side, stripe)
            if not any(self._has_piece(side, segment) for segment in stripe.segments):
                self._without.add(key)
                return
        block = self.block(side, stripe, span.device)
        span.add_(block.current)
        block.pending.zero_()
        block.is_written = block.is_flushed = True

    def _has_piece(self, side: Side, segment: Segment) -> bool:
        first, last = segment.offset, segment.offset + segment.numel
        return any(
            piece.offset < last and first < piece.offset + len(piece.values)
            for piece in self._unassigned.get((side, segment.name), ())
        )

    def finish(self, *, is_valid: IsValid) -> None:
        """Make the residuals written since the last call valid, or discard them.

        If ``is_valid`` is a tensor, the host does not know its value, so the two tensors of a block
        cannot be swapped: the device selects and copies, which takes one more pass over memory.

        Pieces that no stripe has taken are kept: their parameters may be frozen for some steps, or
        the exchange was abandoned before it reached them.
        """
        for key, block in list(self._blocks.items()):
            if isinstance(is_valid, Tensor):
                if block.is_written:
                    torch.where(is_valid, block.pending, block.current, out=block.current)
            elif block.is_written and is_valid:
                if block.is_flushed:
                    del self._blocks[key]  # it would hold zeros only
                # Swapped and not copied: the next exchange overwrites the old residuals.
                block.current, block.pending = block.pending, block.current
            block.is_written = block.is_flushed = False

    def state_dict(self) -> list[State]:
        """Copies of all residuals, one entry per piece, sorted by side, name and offset.

        Sorted, because the order of encoding may depend on measured times.
        """
        pieces = [
            (side, segment.name, _Piece(segment.offset, block.part(position), block.scale))
            for (side, stripe), block in self._blocks.items()
            for position, segment in enumerate(stripe.segments)
        ]
        pieces += [(*key, piece) for key, own in self._unassigned.items() for piece in own]
        entries: list[State] = [
            residual_entry(side, name, piece.values.clone(), piece.scale, piece.offset)
            for side, name, piece in pieces
        ]
        return sorted(entries, key=lambda entry: (entry["side"], entry["name"], entry["offset"]))

    def load_state_dict(self, entries: Sequence[State]) -> None:
        """Restore a `state_dict`. The next exchange may use any layout."""
        self._blocks.clear()
        self._unassigned.clear()
        self._without.clear()
        for entry in entries:
            key = (entry["side"], entry["name"])
            piece = _Piece(entry["offset"], entry["values"].clone(), scale_of(entry))
            self._unassigned.setdefault(key, []).append(piece)

    def _take(self, side: Side, name: str, offset: int, into: Tensor) -> None:
        """Add unassigned pieces to ``into``, which begins at element ``offset`` of a parameter."""
        left = []
        for piece in self._unassigned.pop((side, name), []):
            start, values = piece.offset, piece.values
            first, last = max(start, offset), min(start + len(values), offset + len(into))
            if first >= last:
                left.append(piece)
                continue
            # Added, not written: a worker may have lost a part of the same elements as an earlier
            # owner.
            part = values[first - start : last - start].to(into)
            if piece.scale != self.scale:
                part = part * (self.scale / piece.scale)
            into[first - offset : last - offset] += part
            before = _Piece(start, values[: first - start], piece.scale)
            after = _Piece(last, values[last - start :], piece.scale)
            left += [each for each in (before, after) if len(each.values)]
        if left:
            self._unassigned[side, name] = left

    def _detach(self, side: Side, stripe: Layout) -> None:
        """Split blocks of an earlier layout that overlap a stripe into unassigned pieces."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for s in stripe.segments:
            wanted.setdefault(s.name, []).append((s.offset, s.offset + s.numel))
        for key, block in list(self._blocks.items()):
            if key[0] != side or not any(
                first < s.offset + s.numel and s.offset < last
                for s in block.stripe.segments
                for first, last in wanted.get(s.name, ())
            ):
                continue
            if block.is_written:
                raise UsageError(
                    "Elements of one parameter were encoded twice in one exchange, in different "
                    "stripes. Call finish() between exchanges, and give each exchange a codec of "
                    "its own (codec.new_instance())."
                )
            del self._blocks[key]
            for position, s in enumerate(block.stripe.segments):
                pieces = self._unassigned.setdefault((side, s.name), [])
                pieces.append(_Piece(s.offset, block.part(position), block.scale))


def residual_entry(side: Side, name: str, values: Tensor, scale: float, offset: int = 0) -> State:
    """An entry of a state: residuals ``values`` (n,) from element ``offset`` of ``name`` on."""
    return {"side": side, "name": name, "offset": offset, "values": values, "scale": scale}


def scale_of(entry: State) -> float:
    """The factor between sum and mean in the exchange that a saved residual is from."""
    scale: float = entry.get("scale", 1.0)
    return scale


def reshard(states: Sequence[State], num_workers: int) -> State:
    """Compute the state for each of ``num_workers`` workers from those of all old ranks. Local.

    ``states`` are the results of `ErrorFeedback.state_dict` of every old rank, in rank order. The
    means have lost the sum of all residuals of workers and owners, each divided by its scale. Each
    new worker takes an equal part of that, with a scale of 1. Owners begin with zeros. If only some
    ranks encode (leaders of nodes), ``num_workers`` is their number.

    Raises UsageError: no states, or no workers.

    >>> from torchmn.comm.codecs.residuals import reshard
    >>> reshard([{"residuals": []}, {"residuals": []}], 3)  # nothing was lost so far
    {'residuals': []}
    """
    if not states or num_workers < 1:
        raise UsageError(
            f"reshard() needs the states of all old ranks and at least one new worker, but got "
            f"{len(states)} states and num_workers={num_workers}."
        )
    entries = [entry for state in states for entry in state["residuals"]]
    lengths: dict[str, int] = {}
    for entry in entries:
        end = entry["offset"] + len(entry["values"])
        lengths[entry["name"]] = max(end, lengths.get(entry["name"], 0))
    # In float64, so that the shares of all new workers add up to what was lost.
    totals = {n: torch.zeros(k, dtype=torch.float64, device="cpu") for n, k in lengths.items()}
    for entry in entries:
        first, values = entry["offset"], entry["values"]
        lost = values.to("cpu", torch.float64) / scale_of(entry)
        totals[entry["name"]][first : first + len(values)] += lost
    dtypes = {entry["name"]: entry["values"].dtype for entry in entries}
    shares = {name: (total / num_workers).to(dtypes[name]) for name, total in totals.items()}
    residuals = [residual_entry("worker", name, share, 1.0) for name, share in shares.items()]
    return {**states[0], "residuals": residuals}
