"""Sequences of `ChunkInfo`, one for each chunk."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from torchmn.cntk.readers.deserializer import ChunkInfo, Indices


class InfosOnDemand(Sequence[ChunkInfo]):
    """Base class: what is known of a chunk is found when it is asked for, not for all at once."""

    @abstractmethod
    def info(self, chunk_id: int) -> ChunkInfo:
        """What is known of a chunk. Raises IndexError: there is no such chunk."""

    @overload
    def __getitem__(self, chunk_id: int) -> ChunkInfo: ...
    @overload
    def __getitem__(self, chunk_id: slice) -> Sequence[ChunkInfo]: ...
    def __getitem__(self, chunk_id: int | slice) -> ChunkInfo | Sequence[ChunkInfo]:
        if isinstance(chunk_id, slice):
            return [self.info(number) for number in range(*chunk_id.indices(len(self)))]
        return self.info(chunk_id)

    def __iter__(self) -> Iterator[ChunkInfo]:
        return (self.info(number) for number in range(len(self)))


def sequence_lengths(infos: Sequence[ChunkInfo]) -> Indices | None:
    """The samples of each sequence of some chunks; None where each sequence has one."""
    if all(info.lengths is None for info in infos):
        return None
    return np.concatenate(
        [
            np.ones(info.num_sequences, np.int64) if info.lengths is None else info.lengths
            for info in infos
        ]
    )
