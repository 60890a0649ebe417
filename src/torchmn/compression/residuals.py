"""What is owed to the model: for each parameter, what encoding has lost so far.

Kept by the parameter's name and the position in it, once for what this rank owes as a worker and
once for what it owes as the owner of stripes. Buckets and stripes may be laid out anew at any time
between two exchanges: residuals move along. What one exchange writes becomes valid when it ends, so
that an exchange whose result is thrown away leaves no trace.

Values are kept in the unit of the exchange that wrote them, whose sum was ``scale`` times the mean:
``values / scale`` is what the mean has lost, whatever the weights were. An exchange of another
scale converts what it uses, by the ratio; with equal scales no bit changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmn.compression.base import Side
from torchmn.compression.layout import Layout
from torchmn.errors import UsageError

State = dict[str, Any]


class ResidualBlock:
    """The residuals of one stripe: ``now`` (span,), and ``rest`` (span,), which may replace it."""

    def __init__(self, stripe: Layout, device: torch.device, scale: float) -> None:
        self.stripe = stripe
        self.scale = scale
        self.now = torch.zeros(stripe.span, dtype=stripe.wide_dtype, device=device)
        self.rest = torch.zeros_like(self.now)
        self.is_written = False

    def convert(self, scale: float) -> None:
        """Keep the valid residuals in the unit of an exchange of this scale."""
        if scale != self.scale:
            self.now.mul_(scale / self.scale)
            self.scale = scale

    def part(self, position: int) -> Tensor:
        """The valid residuals of one segment, a view."""
        segment = self.stripe.segments[position]
        start = segment.start - self.stripe.begin
        return self.now[start : start + segment.numel]


class Residuals:
    """All residuals of one rank. Local."""

    def __init__(self) -> None:
        self.scale = 1.0
        """Of the exchange under way: how many times its mean the sum is."""
        self._runs: dict[tuple[Side, Layout], ResidualBlock] = {}
        self._loose: dict[tuple[Side, str], list[_Piece]] = {}
        """Loaded, or of a layout that is no more, until a stripe claims them."""

    def run(
        self, side: Side, stripe: Layout, device: torch.device, *, is_owner: bool = True
    ) -> ResidualBlock:
        """The residuals of a stripe in the unit of this exchange, zeros where there are none yet.

        A worker that is not the stripe's owner takes over what it owes as its owner of before: it
        is owed to the sum all the same.
        """
        run = self._runs.get((side, stripe))
        if run is None:
            sides: tuple[Side, ...] = (side,) if is_owner else ("worker", "owner")
            run = ResidualBlock(stripe, device, self.scale)
            for claimed in sides:
                self._loosen(claimed, stripe)
                for position, segment in enumerate(stripe.segments):
                    self._claim(claimed, segment.name, segment.offset, run.part(position))
            self._runs[side, stripe] = run
        run.convert(self.scale)
        return run

    def finish(self, *, is_valid: bool) -> None:
        """Make valid what was written since the last call, or forget it.

        What no stripe has claimed by now belongs to parameters that are exchanged no more, or on
        another rank.
        """
        for run in self._runs.values():
            if run.is_written and is_valid:
                run.now, run.rest = run.rest, run.now
            run.is_written = False
        self._loose.clear()

    def state_dict(self) -> list[State]:
        """One entry for each run of elements of a parameter, as copies, in an order of their own.

        The order of encoding may come from measured times, and a state should not.
        """
        entries: list[State] = [
            {
                "side": side,
                "name": segment.name,
                "offset": segment.offset,
                "values": run.part(position).clone(),
                "scale": run.scale,
            }
            for (side, stripe), run in self._runs.items()
            for position, segment in enumerate(stripe.segments)
        ]
        entries += [
            {
                "side": side,
                "name": name,
                "offset": piece.offset,
                "values": piece.values.clone(),
                "scale": piece.scale,
            }
            for (side, name), pieces in self._loose.items()
            for piece in pieces
        ]
        return sorted(entries, key=lambda entry: (entry["side"], entry["name"], entry["offset"]))

    def load_state_dict(self, entries: Sequence[State]) -> None:
        """Go on from `state_dict`, in whatever layout comes next."""
        self._runs.clear()
        self._loose.clear()
        for entry in entries:
            key = (entry["side"], entry["name"])
            piece = _Piece(entry["offset"], entry["values"].clone(), scale_of(entry))
            self._loose.setdefault(key, []).append(piece)

    def _claim(self, side: Side, name: str, offset: int, into: Tensor) -> None:
        """Add loose residuals of a run of elements to ``into``; they are loose no more."""
        pieces = self._loose.pop((side, name), [])
        left = []
        for piece in pieces:
            start, values = piece.offset, piece.values
            first, last = max(start, offset), min(start + len(values), offset + len(into))
            if first >= last:
                left.append(piece)
                continue
            part = values[first - start : last - start].to(into)
            if piece.scale != self.scale:
                part = part * (self.scale / piece.scale)
            into[first - offset : last - offset] += part
            before = _Piece(start, values[: first - start], piece.scale)
            after = _Piece(last, values[last - start :], piece.scale)
            left += [each for each in (before, after) if len(each.values)]
        if left:
            self._loose[side, name] = left

    def _loosen(self, side: Side, stripe: Layout) -> None:
        """Take apart the runs of an earlier layout that hold elements of this stripe."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for s in stripe.segments:
            wanted.setdefault(s.name, []).append((s.offset, s.offset + s.numel))
        for key, run in list(self._runs.items()):
            if key[0] != side or not any(
                first < s.offset + s.numel and s.offset < last
                for s in run.stripe.segments
                for first, last in wanted.get(s.name, ())
            ):
                continue
            if run.is_written:
                raise UsageError(
                    "Elements of one parameter were encoded twice in one exchange, in different "
                    "stripes. Call finish() between exchanges, and give each exchange a codec of "
                    "its own (codec.new_instance())."
                )
            del self._runs[key]
            for position, s in enumerate(run.stripe.segments):
                pieces = self._loose.setdefault((side, s.name), [])
                pieces.append(_Piece(s.offset, run.part(position), run.scale))


@dataclass(frozen=True)
class _Piece:
    """Residuals of a run of elements of a parameter that no stripe has claimed yet."""

    offset: int
    values: Tensor
    scale: float


def scale_of(entry: State) -> float:
    """How many times its mean the sum was, of the exchange that a saved residual is from."""
    scale: float = entry.get("scale", 1.0)
    return scale


def reshard(states: Sequence[State], num_workers: int) -> State:
    """The state that each of ``num_workers`` workers loads, from those of all old ones. Local.

    ``states`` are `ErrorFeedback.state_dict` of every old rank, in rank order. What the means have
    lost is the sum of all residuals over their scales, workers' and owners' alike; each new worker
    takes an equal part of it, in the unit of the mean: with a scale of 1. Owners begin with zeros.
    Where only some ranks encode (leaders of nodes), ``num_workers`` is their number.
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
    owed = {name: torch.zeros(n, dtype=torch.float64, device="cpu") for name, n in lengths.items()}
    for entry in entries:
        first, values = entry["offset"], entry["values"]
        lost = values.to("cpu", torch.float64) / scale_of(entry)
        owed[entry["name"]][first : first + len(values)] += lost
    dtypes = {entry["name"]: entry["values"].dtype for entry in entries}
    return {
        **states[0],
        "residuals": [
            {
                "side": "worker",
                "name": name,
                "offset": 0,
                "values": (total / num_workers).to(dtypes[name]),
                "scale": 1.0,
            }
            for name, total in owed.items()
        ],
    }
