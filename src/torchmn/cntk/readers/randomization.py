"""The order of the sequences: a function of the seed and the sweep, not of the number of ranks.

The chunks of a sweep are shuffled and divided into blocks of at most half of the window: one block
is in use while the next one is read. The sequences of a block are shuffled together. Where all
chunks fit into the window there is one block, whose chunks stay in memory from sweep to sweep.

CNTK moves each sequence within a window that slides over the chunks. Blocks mix as well, as chunks
are shuffled over the whole data set in both, and the order of a block needs no other block, so that
resuming in the middle of a sweep reads nothing that comes before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from torchmn.base.errors import DataError, UsageError
from torchmn.cntk.readers.assembly import empty, gather, join
from torchmn.cntk.readers.deserializer import (
    Chunk,
    ChunkInfo,
    Indices,
    StreamInformation,
    sequence_lengths,
)
from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.data import shard_bounds
from torchmn.data.permutations import keyed_permutation


@dataclass(frozen=True)
class Position:
    """The next sequence: its sweep, its block in the sweep and its place in the block."""

    sweep: int = 0
    block: int = 0
    sequence: int = 0

    def state(self) -> dict[str, int]:
        """The position as numbers, for a checkpoint."""
        return {"sweep": self.sweep, "block": self.block, "sequence": self.sequence}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """The inverse of `state`."""
        return cls(*(int(state[name]) for name in ("sweep", "block", "sequence")))


@dataclass(frozen=True, eq=False)
class Block:
    """Chunks whose sequences are shuffled together.

    ``chunks`` and ``indices`` have, for each sequence in order, the number of its chunk and its
    place there; ``lengths`` its samples, or None where each sequence has one.
    """

    sweep: int
    number: int
    chunk_ids: tuple[int, ...]
    chunks: Indices
    indices: Indices
    lengths: Indices | None

    def __len__(self) -> int:
        return len(self.chunks)

    @cached_property
    def ends(self) -> Indices:
        """The number of samples up to the end of each sequence."""
        lengths = self.lengths
        return np.arange(1, len(self) + 1) if lengths is None else np.cumsum(lengths)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Neighbouring sequences of a block."""

    block: Block
    begin: int
    end: int

    @property
    def lengths(self) -> Indices:
        """The number of samples of each sequence."""
        if self.block.lengths is None:
            return np.ones(self.end - self.begin, np.int64)
        return self.block.lengths[self.begin : self.end]

    def part(self, begin: int, end: int) -> Sequences:
        """The sequences from ``begin`` to ``end`` of these; none where they lie outside."""
        begin, end = (min(max(at, 0), self.end - self.begin) for at in (begin, end))
        return replace(self, begin=self.begin + begin, end=self.begin + max(begin, end))


@dataclass(frozen=True, eq=False)
class GlobalMinibatch:
    """The sequences of one minibatch over all partitions, in order."""

    parts: tuple[Sequences, ...]
    num_samples: int
    sweep_end: bool
    next_position: Position

    @property
    def chunk_ids(self) -> set[int]:
        """The chunks of the blocks that it is from."""
        return {chunk for part in self.parts for chunk in part.block.chunk_ids}

    def partition(self, num_partitions: int, index: int) -> list[Sequences]:
        """One partition's sequences: neighbours, so that all partitions together keep the order.

        Partition r of n samples gets ``n // W + (r < n % W)``, as in CNTK; a sequence of several
        samples belongs to the partition in whose share its middle is.
        """
        if num_partitions == 1:
            return list(self.parts)
        bounds = shard_bounds(self.num_samples, num_partitions, index, force_equal_length=False)
        lengths = np.concatenate([part.lengths for part in self.parts])
        middles = np.cumsum(lengths) - (lengths + 1) // 2
        begin, end = (int(np.searchsorted(middles, bound)) for bound in bounds)
        if index == num_partitions - 1:
            end = len(lengths)
        found, before = [], 0
        for part in self.parts:
            own = part.part(begin - before, end - before)
            before += part.end - part.begin
            if own.end > own.begin:
                found.append(own)
        return found

    def read(
        self,
        num_partitions: int,
        index: int,
        streams: Sequence[StreamInformation],
        chunk: Callable[[int], Chunk],
        seed: int,
    ) -> dict[str, MinibatchData]:
        """Decode one partition's part. ``chunk`` returns a chunk; ``seed``: of the source."""
        pieces = [
            gather(
                part.block.chunks[part.begin : part.end],
                part.block.indices[part.begin : part.end],
                streams,
                chunk,
                (seed, part.block.sweep),
            )
            for part in self.partition(num_partitions, index)
        ]
        found = {}
        for stream in streams:
            data, lengths = join([p[stream.name] for p in pieces]) if pieces else empty(stream)
            num_sequences = data.shape[0] if lengths is None else len(lengths)
            found[stream.name] = MinibatchData(
                data, num_sequences, data.shape[0], self.sweep_end, lengths
            )
        return found


class SequenceOrder:
    """All sequences of all sweeps in order. Local, and the same on all ranks.

    Args:
        infos: infos of the chunks; only those of blocks that are reached are read.
        seed: the seed of the shuffling; None keeps the order of the data.
        window_in_chunks: chunks in memory.
        window_in_samples: the same in samples; used if ``window_in_chunks`` is 0.
    """

    def __init__(
        self,
        infos: Sequence[ChunkInfo],
        seed: int | None,
        window_in_chunks: int,
        window_in_samples: int = 0,
    ) -> None:
        self._infos = infos
        self._seed = seed
        self._window_in_chunks = window_in_chunks
        self._window_in_samples = window_in_samples
        self.keeps_all = self._fits_into_window()
        """Whether all chunks fit into the window."""
        self._blocks: dict[tuple[int, int], Block] = {}
        self._sweeps: dict[int, list[tuple[int, ...]]] = {}

    def start(self, sweep: int = 0) -> Position:
        """The position at which a sweep begins."""
        return Position(sweep)

    def reading_at(self, position: Position) -> Position:
        """The next sequence to be read."""
        return position

    def restored(self, state: Mapping[str, Any]) -> Position:
        """The position of a saved state. Raises UsageError: there is no such place."""
        position = Position.from_state(state)
        self.check(position)
        return position

    def check(self, position: Position) -> None:
        """Raise UsageError if there is no such position."""
        is_there = position.sweep >= 0 and 0 <= position.block < self.num_blocks(position.sweep)
        if not is_there or not 0 <= position.sequence <= len(self.block(position)):
            raise UsageError(
                f"Sweep {position.sweep}, block {position.block}, sequence {position.sequence} is "
                "outside of the data. Was the state saved with other data?"
            )

    def num_blocks(self, sweep: int) -> int:
        """The number of blocks of a sweep."""
        return len(self._chunks_of_blocks(sweep))

    def chunk_ids(self, position: Position) -> tuple[int, ...]:
        """The chunks of the block at a position."""
        return self._chunks_of_blocks(position.sweep)[position.block]

    def block(self, position: Position) -> Block:
        """The block at a position."""
        key = (position.sweep, position.block)
        if key not in self._blocks:
            while len(self._blocks) > 2:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[key] = self._make_block(*key)
        return self._blocks[key]

    def next_block(self, position: Position) -> Position:
        """The beginning of the block after the one at a position."""
        if position.block + 1 < self.num_blocks(position.sweep):
            return Position(position.sweep, position.block + 1)
        return Position(position.sweep + 1)

    def fraction(self, position: Position) -> float:
        """Sweeps done at a position, with the part of the current one, by blocks."""
        if position.sequence == 0 and position.block == 0:
            return float(position.sweep)
        in_block = position.sequence / max(len(self.block(position)), 1)
        return position.sweep + (position.block + in_block) / self.num_blocks(position.sweep)

    def take(
        self, start: Position, num_samples: int, end_sweep: int | None, crosses_sweeps: bool = True
    ) -> GlobalMinibatch | None:
        """Whole sequences of up to ``num_samples``, but at least one; None at the end.

        Raises DataError: a whole sweep has no sequence.
        """
        if start.sweep == end_sweep:
            return None
        position = self._with_sequence(start)
        parts: list[Sequences] = []
        taken = 0
        while position.sweep != end_sweep:
            block, begin = self.block(position), position.sequence
            before = int(block.ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(block.ends, before + num_samples - taken, side="right"))
            if not parts:
                end = max(end, begin + 1)
            if end <= begin:
                break
            parts.append(Sequences(block, begin, end))
            taken += int(block.ends[end - 1]) - before
            sweep = position.sweep
            position = self._with_sequence(replace(position, sequence=end))
            if taken >= num_samples or (position.sweep > sweep and not crosses_sweeps):
                break
        if not parts:
            return None
        return GlobalMinibatch(tuple(parts), taken, position.sweep > start.sweep, position)

    def next_sequence(
        self, start: Position, end_sweep: int | None
    ) -> tuple[Position, Position] | None:
        """The position of the next sequence and the one after it; None at the end."""
        if start.sweep == end_sweep:
            return None
        at = self._with_sequence(start)
        if at.sweep == end_sweep:
            return None
        return at, self._with_sequence(replace(at, sequence=at.sequence + 1))

    def _with_sequence(self, position: Position) -> Position:
        """The same position, or the next one that has a sequence."""
        start = position
        while position.sequence >= self._num_sequences(position):
            position = self.next_block(position)
            if position.sweep > start.sweep + 1:
                raise DataError(
                    f"A whole sweep over {len(self._infos)} chunks has no sequence. A source needs "
                    "at least one sample: is the right file given?"
                )
        return position

    # ---- blocks

    def _num_sequences(self, position: Position) -> int:
        """The number of sequences of the block at a position."""
        known = self._blocks.get((position.sweep, position.block))
        if known is not None:
            return len(known)
        return sum(self._infos[chunk].num_sequences for chunk in self.chunk_ids(position))

    def _chunks_of_blocks(self, sweep: int) -> list[tuple[int, ...]]:
        if sweep not in self._sweeps:
            while len(self._sweeps) > 1:
                del self._sweeps[next(iter(self._sweeps))]
            self._sweeps[sweep] = self._divide(sweep)
        return self._sweeps[sweep]

    def _divide(self, sweep: int) -> list[tuple[int, ...]]:
        num_chunks = len(self._infos)
        if self._seed is None:
            return [(chunk,) for chunk in range(num_chunks)]
        order = [int(c) for c in keyed_permutation(num_chunks, self._seed, sweep)]
        if self.keeps_all:
            return [tuple(order)]
        if self._window_in_chunks:
            # At most half of the window, and evenly: the last block mixes as well as the others.
            num_blocks = -(-num_chunks // max(self._window_in_chunks // 2, 1))
            return [tuple(map(int, part)) for part in np.array_split(order, num_blocks)]
        blocks: list[tuple[int, ...]] = []
        current: list[int] = []
        samples = 0
        for chunk in order:
            size = self._infos[chunk].num_samples
            if current and samples + size > self._window_in_samples // 2:
                blocks.append(tuple(current))
                current, samples = [], 0
            current.append(chunk)
            samples += size
        return [*blocks, tuple(current)]

    def _fits_into_window(self) -> bool:
        if self._window_in_chunks:
            return len(self._infos) <= self._window_in_chunks
        # Lazily: where infos are made on demand, no more of them than the window has.
        totals = accumulate(info.num_samples for info in self._infos)
        return all(total <= self._window_in_samples for total in totals)

    def _make_block(self, sweep: int, number: int) -> Block:
        chunk_ids = self._chunks_of_blocks(sweep)[number]
        infos = [self._infos[chunk] for chunk in chunk_ids]
        counts = [info.num_sequences for info in infos]
        chunks = np.repeat(np.array(chunk_ids, np.int64), counts)
        indices = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        lengths = sequence_lengths(infos)
        if self._seed is not None:
            # Not 0: numpy takes (seed, sweep, 0) for (seed, sweep), the key of the order of chunks.
            order = keyed_permutation(len(chunks), self._seed, sweep, number + 1)
            chunks, indices = chunks[order], indices[order]
            lengths = None if lengths is None else lengths[order]
        return Block(sweep, number, chunk_ids, chunks, indices, lengths)
