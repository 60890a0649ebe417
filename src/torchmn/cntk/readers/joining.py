"""Several deserializers as one: the streams of each sequence, joined by its key or its position."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchmn.base.errors import DataError, UsageError
from torchmn.cntk.readers.assembly import gather
from torchmn.cntk.readers.deserializer import (
    Chunk,
    ChunkInfo,
    Deserializer,
    Indices,
    Seed,
    StreamData,
    StreamInformation,
    has_one_sample,
    sequence_lengths,
)
from torchmn.cntk.readers.files import ProcessLock


class JoinedDeserializer:
    """The streams of several deserializers. Local.

    The first one has the chunks. Its sequences are found in the others by their keys if all have
    keys, else by their position. In memory are, besides its chunks, those of the others that have
    their sequences: files in about the same order need the least memory.

    Raises:
        UsageError: two streams define the minibatch size.
        DataError: the deserializers have different sequences.
    """

    def __init__(self, deserializers: Sequence[Deserializer]) -> None:
        self._deserializers = list(deserializers)
        first, *others = self._deserializers
        self._first = first
        infos = [list(deserializer.chunk_infos()) for deserializer in self._deserializers]
        counts = [sum(info.num_sequences for info in own) for own in infos]
        if len(set(counts)) > 1:
            raise DataError(
                "The deserializers of a source have different numbers of sequences: "
                + ", ".join(f"{d!r} {n:,}" for d, n in zip(deserializers, counts, strict=True))
                + ". Give each sequence in all of them, or make a source of each."
            )
        keys = [_keys(own) for own in infos]
        has_keys = all(own is not None for own in keys)
        self._starts = np.cumsum([0, *(info.num_sequences for info in infos[0])])
        self._others = []
        lengths = [sequence_lengths(own) for own in infos]
        for number, other in enumerate(others, 1):
            order = np.arange(counts[0])
            if has_keys:
                order = _match(keys[0] or (), keys[number] or (), first, other)
            own_lengths = lengths[number]
            lengths[number] = None if own_lengths is None else own_lengths[order]
            starts = np.cumsum([0, *(info.num_sequences for info in infos[number])])
            self._others.append(_Other(other, starts, order))
        self._infos = self._chunk_infos(infos[0], lengths)
        self.is_parallel = any(getattr(d, "is_parallel", False) for d in self._deserializers)
        self.is_in_memory = all(getattr(d, "is_in_memory", False) for d in self._deserializers)

    def stream_infos(self) -> list[StreamInformation]:
        """See `Deserializer`."""
        return [
            info for deserializer in self._deserializers for info in deserializer.stream_infos()
        ]

    def num_chunks(self) -> int:
        """See `Deserializer`."""
        return self._first.num_chunks()

    def chunk_infos(self) -> Sequence[ChunkInfo]:
        """See `Deserializer`."""
        return self._infos

    def get_chunk(self, chunk_id: int) -> Chunk:
        """See `Deserializer`."""
        begin, end = (int(n) for n in self._starts[chunk_id : chunk_id + 2])
        own = self._first.get_chunk(chunk_id)
        return _JoinedChunk(own, [other.part(begin, end) for other in self._others])

    def _chunk_infos(
        self, infos: list[ChunkInfo], lengths: list[Indices | None]
    ) -> list[ChunkInfo]:
        defining = [
            number
            for number, deserializer in enumerate(self._deserializers)
            for stream in deserializer.stream_infos()
            if stream.defines_mb_size
        ]
        if len(defining) > 1:
            raise UsageError(
                f"{len(defining)} streams have defines_mb_size=True. The samples of one stream "
                "count for the minibatch size: keep it on one."
            )
        if defining:
            counted = lengths[defining[0]]
        elif all(own is None for own in lengths):
            counted = None
        else:
            ones = np.ones(int(self._starts[-1]), np.int64)
            counted = np.max([ones if own is None else own for own in lengths], axis=0)
        joined = []
        for info, begin in zip(infos, self._starts, strict=False):
            own = None if counted is None else counted[begin : begin + info.num_sequences]
            num_samples = info.num_sequences if own is None else int(own.sum())
            joined.append(
                ChunkInfo(num_sequences=info.num_sequences, num_samples=num_samples, lengths=own)
            )
        return joined

    def has_one_sample(self) -> dict[str, bool]:
        """See `Deserializer`."""
        return {n: one for part in self._deserializers for n, one in has_one_sample(part).items()}

    def __repr__(self) -> str:
        return " and ".join(map(repr, self._deserializers))


@dataclass(eq=False)
class _Held:
    """A chunk of another deserializer, in memory while a joined chunk needs it."""

    chunk: Chunk


class _Other:
    """Another deserializer, and where it has the sequences of the first one."""

    def __init__(self, deserializer: Deserializer, starts: Indices, order: Indices) -> None:
        self._deserializer = deserializer
        self._streams = deserializer.stream_infos()
        self._starts = starts
        self._order = order
        self._lock = ProcessLock()
        self._held: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()

    def part(self, begin: int, end: int) -> _Part:
        """The sequences that belong to those from ``begin`` to ``end`` of the first one."""
        numbers = self._order[begin:end]
        chunks = np.searchsorted(self._starts, numbers, side="right") - 1
        held = {int(c): self._hold(int(c)) for c in np.unique(chunks)}
        return _Part(self._streams, chunks, numbers - self._starts[chunks], held)

    def _hold(self, chunk_id: int) -> _Held:
        # Read under the lock: a chunk that several threads need is read once.
        with self._lock:
            held = self._held.get(chunk_id)
            if held is None:
                held = self._held[chunk_id] = _Held(self._deserializer.get_chunk(chunk_id))
            return held

    def __reduce__(self) -> tuple[object, ...]:
        # Weak references cannot be pickled, and a worker process reads its chunks itself.
        return _Other, (self._deserializer, self._starts, self._order)


@dataclass(frozen=True, eq=False)
class _Part:
    streams: list[StreamInformation]
    chunks: Indices
    indices: Indices
    held: Mapping[int, _Held]

    def sequences(self, indices: Indices, seed: Seed) -> dict[str, StreamData]:
        """See `Chunk`."""
        return gather(
            self.chunks[indices],
            self.indices[indices],
            self.streams,
            lambda chunk_id: self.held[chunk_id].chunk,
            seed,
        )


@dataclass(frozen=True, eq=False)
class _JoinedChunk:
    first: Chunk
    others: list[_Part]

    def sequences(self, indices: Indices, seed: Seed) -> dict[str, StreamData]:
        """See `Chunk`."""
        parts = [part.sequences(indices, seed) for part in (self.first, *self.others)]
        return {name: data for part in parts for name, data in part.items()}


def _keys(infos: list[ChunkInfo]) -> list[Hashable] | None:
    keys: list[Hashable] = []
    for info in infos:
        if info.keys is None:
            return None
        keys.extend(info.keys)
    return keys


def _match(
    wanted: Sequence[Hashable], keys: Sequence[Hashable], first: Deserializer, other: Deserializer
) -> Indices:
    """For each key, the number of its sequence in the other deserializer. Raises DataError."""
    for each, own in ((first, wanted), (other, keys)):
        places = {key: number for number, key in enumerate(own)}
        if len(places) < len(own):
            doubled = next(key for number, key in enumerate(own) if places[key] != number)
            raise DataError(
                f"{each!r} has several sequences with the key {doubled!r}. Each key may occur once."
            )
    missing = [key for key in wanted if key not in places]
    if missing:
        raise DataError(
            f"{len(missing):,} sequences of {first!r} are not in {other!r}, the first one with the "
            f"key {missing[0]!r}. Give each sequence in all deserializers of a source."
        )
    return np.array([places[key] for key in wanted], np.int64)
