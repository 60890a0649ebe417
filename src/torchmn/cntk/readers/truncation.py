"""Pieces of sequences, for truncated backpropagation through time.

A minibatch of n samples has ``n // truncation_length`` rows. Each row goes through its sequence in
pieces of ``truncation_length`` samples, the last one shorter, and then begins the next sequence
that no row has begun. Row i of a minibatch continues row i of the one before, so that a recurrent
state can be carried over; ``is_first`` says where it starts from zero. At the end of the data a row
without a sequence has a piece of no samples.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from torchmn.base.errors import DataError
from torchmn.cntk.readers.assembly import empty, gather, join, select
from torchmn.cntk.readers.deserializer import Chunk, StreamData, StreamInformation
from torchmn.cntk.readers.files import ProcessLock
from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.cntk.readers.randomization import Block, Position, SequenceOrder
from torchmn.data import shard_bounds


@dataclass(frozen=True)
class Row:
    """A sequence that has been begun, and how many of its samples are done."""

    at: Position
    done: int


@dataclass(frozen=True)
class RowPosition:
    """The next sequence, and the rows that are in the middle of one; None for a row without."""

    following: Position = Position()
    rows: tuple[Row | None, ...] = ()

    @property
    def sweep(self) -> int:
        """The earliest sweep of which there are samples left."""
        return min([self.following.sweep, *(row.at.sweep for row in self.rows if row)])

    def state(self) -> dict[str, Any]:
        """The position as numbers, for a checkpoint; a row without a sequence has none."""
        rows = [
            [row.at.sweep, row.at.block, row.at.sequence, row.done] if row else []
            for row in self.rows
        ]
        return {**self.following.state(), "rows": rows}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RowPosition:
        """The inverse of `state`."""
        rows = [
            Row(Position(*(int(n) for n in row[:3])), int(row[3])) if len(row) else None
            for row in state["rows"]
        ]
        return cls(Position.from_state(state), tuple(rows))


@dataclass(frozen=True, eq=False)
class Piece:
    """Samples ``begin`` to ``end`` of a sequence."""

    block: Block
    sequence: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class TruncatedMinibatch:
    """One piece for each row, over all partitions; None for a row without a sequence."""

    pieces: tuple[Piece | None, ...]
    num_samples: int
    sweep_end: bool
    next_position: RowPosition
    decoded: Decoded = field(repr=False)

    @property
    def chunk_ids(self) -> set[int]:
        """The chunks of the blocks that it is from."""
        return {chunk for piece in self.pieces if piece for chunk in piece.block.chunk_ids}

    def read(
        self,
        num_partitions: int,
        index: int,
        streams: Sequence[StreamInformation],
        chunk: Callable[[int], Chunk],
        seed: int,
    ) -> dict[str, MinibatchData]:
        """Decode one partition's rows, which are the same ones in every minibatch."""
        begin, end = shard_bounds(len(self.pieces), num_partitions, index, force_equal_length=False)
        pieces = self.pieces[begin:end]
        found: list[dict[str, StreamData]] = []
        for piece in pieces:
            if piece is not None:
                whole = self.decoded(piece, streams, chunk, seed)
                rows = np.arange(piece.begin, piece.end)
                lengths = torch.tensor([len(rows)], device="cpu")
                found.append({n: (select(data, rows), lengths) for n, data in whole.items()})
        lengths = torch.tensor(
            [p.end - p.begin if p else 0 for p in pieces], dtype=torch.int64, device="cpu"
        )
        is_first = torch.tensor(
            [p is None or p.begin == 0 for p in pieces], dtype=torch.bool, device="cpu"
        )
        minibatch = {}
        for stream in streams:
            data, _ = join([own[stream.name] for own in found]) if found else empty(stream)
            minibatch[stream.name] = MinibatchData(
                data, len(lengths), data.shape[0], self.sweep_end, lengths, is_first
            )
        return minibatch


class Decoded:
    """Sequences that rows are in the middle of, so that each is decoded once."""

    def __init__(self) -> None:
        self.capacity = 1
        self._lock = ProcessLock()
        self._sequences: OrderedDict[tuple[int, ...], dict[str, torch.Tensor]] = OrderedDict()

    def __call__(
        self,
        piece: Piece,
        streams: Sequence[StreamInformation],
        chunk: Callable[[int], Chunk],
        seed: int,
    ) -> dict[str, torch.Tensor]:
        """The samples of all streams of the whole sequence of a piece."""
        block, at = piece.block, piece.sequence
        key = (block.sweep, int(block.chunks[at]), int(block.indices[at]))
        with self._lock:
            if key in self._sequences:
                self._sequences.move_to_end(key)
                return self._sequences[key]
        # Without the lock, so that threads decode side by side; two may decode the same sequence.
        chunks, indices = block.chunks[at : at + 1], block.indices[at : at + 1]
        found = gather(chunks, indices, streams, chunk, (seed, block.sweep))
        length = 1 if block.lengths is None else int(block.lengths[at])
        whole = {}
        for name, (data, _) in found.items():
            if data.shape[0] != length:
                raise DataError(
                    f"Stream {name!r} has {data.shape[0]:,} samples in a sequence where the "
                    f"minibatch size counts {length:,}. truncation_length needs all streams of a "
                    "sequence to have the same length."
                )
            whole[name] = data
        with self._lock:
            self._sequences[key] = whole
            while len(self._sequences) > self.capacity:
                self._sequences.popitem(last=False)
        return whole

    def __reduce__(self) -> tuple[object, ...]:
        return Decoded, ()


class TruncatedOrder:
    """The pieces of all sequences, in minibatches. Local, and the same on all ranks."""

    def __init__(self, order: SequenceOrder, truncation_length: int) -> None:
        self._order = order
        self._truncation_length = truncation_length
        self._decoded = Decoded()

    def start(self, sweep: int = 0) -> RowPosition:
        """The position at which a sweep begins."""
        return RowPosition(Position(sweep))

    def reading_at(self, position: RowPosition) -> Position:
        """The next sequence to be read."""
        return position.following

    def restored(self, state: Mapping[str, Any]) -> RowPosition:
        """The position of a saved state. Raises UsageError: there is no such place."""
        position = RowPosition.from_state(state)
        self._order.check(position.following)
        for row in position.rows:
            if row is not None:
                self._order.check(row.at)
        return position

    def take(
        self,
        start: RowPosition,
        num_samples: int,
        end_sweep: int | None,
        crosses_sweeps: bool = True,
    ) -> TruncatedMinibatch | None:
        """One piece for each row; None at the end."""
        num_rows = max(num_samples // self._truncation_length, 1)
        rows: list[Row | None] = [*start.rows, *[None] * (num_rows - len(start.rows))]
        following = start.following
        last_sweep = end_sweep
        if not crosses_sweeps:
            last_sweep = start.sweep + 1 if end_sweep is None else min(end_sweep, start.sweep + 1)
        pieces: list[Piece | None] = []
        for number in range(num_rows):
            row = rows[number]
            if row is None and any(rows[num_rows:]):  # one of a larger minibatch before
                parked = next(n for n in range(num_rows, len(rows)) if rows[n])
                row, rows[parked] = rows[parked], None
            if row is None:
                found = self._order.next_sequence(following, last_sweep)
                if found is not None:
                    row, following = Row(found[0], 0), found[1]
            pieces.append(None if row is None else self._piece(row))
            rows[number] = self._rest(row)
        while len(rows) > num_rows and rows[-1] is None:
            rows.pop()
        if not any(pieces):
            return None
        self._decoded.capacity = 4 * len(rows)
        count = sum(piece.end - piece.begin for piece in pieces if piece)
        position = RowPosition(following, tuple(rows))
        return TruncatedMinibatch(
            tuple(pieces), count, position.sweep > start.sweep, position, self._decoded
        )

    def _piece(self, row: Row) -> Piece:
        block = self._order.block(row.at)
        end = min(row.done + self._truncation_length, self._length(row))
        return Piece(block, row.at.sequence, row.done, end)

    def _rest(self, row: Row | None) -> Row | None:
        if row is None or row.done + self._truncation_length >= self._length(row):
            return None
        return replace(row, done=row.done + self._truncation_length)

    def _length(self, row: Row) -> int:
        lengths = self._order.block(row.at).lengths
        return 1 if lengths is None else int(lengths[row.at.sequence])
