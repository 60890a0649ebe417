"""The samples of another deserializer, each as a sequence of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchmn.base.errors import DataError
from torchmn.cntk.readers.assembly import select
from torchmn.cntk.readers.deserializer import (
    Chunk,
    ChunkInfo,
    Deserializer,
    Indices,
    InfosOnDemand,
    Seed,
    StreamData,
    StreamInformation,
)
from torchmn.cntk.readers.files import ProcessLock


class FrameDeserializer:
    """The samples of another deserializer, each as a sequence. Local.

    A chunk is decoded whole when its first sample is read: shuffled frames are from everywhere.
    """

    def __init__(self, deserializer: Deserializer) -> None:
        self._deserializer = deserializer
        self._infos = deserializer.chunk_infos()
        self.is_parallel = getattr(deserializer, "is_parallel", False)
        self.is_in_memory = getattr(deserializer, "is_in_memory", False)

    def stream_infos(self) -> list[StreamInformation]:
        """See `Deserializer`."""
        return self._deserializer.stream_infos()

    def num_chunks(self) -> int:
        """See `Deserializer`."""
        return self._deserializer.num_chunks()

    def chunk_infos(self) -> Sequence[ChunkInfo]:
        """See `Deserializer`."""
        return InfosOnDemand(self._deserializer.num_chunks, self._info)

    def get_chunk(self, chunk_id: int) -> Chunk:
        """See `Deserializer`."""
        where = f"Chunk {chunk_id} of {self._deserializer!r}"
        return _FrameChunk(self._deserializer.get_chunk(chunk_id), self._infos[chunk_id], where)

    def has_one_sample(self) -> dict[str, bool]:
        """See `Deserializer`."""
        return {info.name: True for info in self.stream_infos()}

    def _info(self, chunk_id: int) -> ChunkInfo:
        num_samples = self._infos[chunk_id].num_samples
        return ChunkInfo(num_sequences=num_samples, num_samples=num_samples)

    def __repr__(self) -> str:
        return repr(self._deserializer)


class _FrameChunk:
    def __init__(self, chunk: Chunk, info: ChunkInfo, where: str) -> None:
        self._chunk = chunk
        self._info = info
        self._where = where
        self._lock = ProcessLock()
        self._decoded: tuple[Seed, dict[str, torch.Tensor]] | None = None

    def sequences(self, indices: Indices, seed: Seed) -> dict[str, StreamData]:
        """See `Chunk`."""
        # One thread decodes the whole chunk, and those that need frames of it wait here.
        with self._lock:
            if self._decoded is None or self._decoded[0] != seed:
                self._decoded = (seed, self._decode(seed))
            rows = self._decoded[1]
        return {name: (select(data, indices), None) for name, data in rows.items()}

    def _decode(self, seed: Seed) -> dict[str, torch.Tensor]:
        everything = np.arange(self._info.num_sequences)
        rows = {}
        for name, (data, _) in self._chunk.sequences(everything, seed).items():
            if data.shape[0] != self._info.num_samples:
                raise DataError(
                    f"{self._where}: stream {name!r} has {data.shape[0]:,} samples where the "
                    f"minibatch size counts {self._info.num_samples:,}. frame_mode needs all "
                    "streams of a sequence to have the same length."
                )
            rows[name] = data
        return rows
