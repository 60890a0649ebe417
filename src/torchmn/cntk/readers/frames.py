"""Frame mode: each sample of a sequence is a sequence of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchmn.cntk.readers.assembly import select
from torchmn.cntk.readers.chunk_infos import InfosOnDemand
from torchmn.cntk.readers.deserializer import (
    Chunk,
    ChunkInfo,
    Deserializer,
    Indices,
    Seed,
    StreamData,
)
from torchmn.cntk.readers.process_lock import ProcessLock
from torchmn.cntk.readers.streams import StreamInformation
from torchmn.errors import DataError


class FrameDeserializer:
    """The samples of another deserializer, each as a sequence. Local.

    A chunk is decoded whole when its first sample is read: shuffled frames are from everywhere.
    """

    def __init__(self, deserializer: Deserializer) -> None:
        self._deserializer = deserializer
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
        return _FrameInfos(self._deserializer.chunk_infos())

    def get_chunk(self, chunk_id: int) -> Chunk:
        """See `Deserializer`."""
        info = self._deserializer.chunk_infos()[chunk_id]
        where = f"Chunk {chunk_id} of {self._deserializer!r}"
        return _FrameChunk(self._deserializer.get_chunk(chunk_id), info, where)

    def has_one_sample(self) -> dict[str, bool]:
        """See `DeserializerOfKnownLengths`."""
        return {info.name: True for info in self.stream_infos()}

    def __repr__(self) -> str:
        return repr(self._deserializer)


class _FrameInfos(InfosOnDemand):
    """Made when they are asked for, as an index may be too."""

    def __init__(self, infos: Sequence[ChunkInfo]) -> None:
        self._infos = infos

    def info(self, chunk_id: int) -> ChunkInfo:
        """See `InfosOnDemand`."""
        num_samples = self._infos[chunk_id].num_samples
        return ChunkInfo(num_sequences=num_samples, num_samples=num_samples)

    def __len__(self) -> int:
        return len(self._infos)


class _FrameChunk:
    def __init__(self, chunk: Chunk, info: ChunkInfo, where: str) -> None:
        self._chunk = chunk
        self._info = info
        self._where = where
        self._lock = ProcessLock()
        self._decoded: tuple[Seed, dict[str, torch.Tensor]] | None = None

    def sequences(self, indices: Indices, seed: Seed) -> dict[str, StreamData]:
        """See `Chunk`."""
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
