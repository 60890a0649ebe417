"""Deserializers read a data set in chunks: what a minibatch source asks of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch

from torchmn.cntk.readers.streams import StreamInformation
from torchmn.errors import UnsupportedError

Indices = np.ndarray[Any, np.dtype[np.int64]]

StreamData = tuple[torch.Tensor, torch.Tensor | None]
"""The samples of several sequences one after another, dense ``(num_samples, *shape)`` or sparse CSR
``(num_samples, dimension)``, and the lengths of the sequences as int64 ``(num_sequences,)``; None
where each sequence has one sample."""

Seed = tuple[int, int]
"""The seed of the source and the sweep."""


@dataclass(frozen=True, kw_only=True)
class ChunkInfo:
    """What is known of a chunk without reading it.

    Args:
        num_sequences: its sequences.
        num_samples: its samples, as the minibatch size counts them: those of the stream that
            defines the minibatch size, or of the longest stream of each sequence.
        lengths: samples of each sequence, counted in the same way, ``(num_sequences,)``; None
            where each has one.
        keys: of the sequences, by which several deserializers are joined; None: by position.

    Example:
        >>> ChunkInfo(num_sequences=2, num_samples=5, lengths=np.array([2, 3])).num_samples
        5
    """

    num_sequences: int
    num_samples: int
    lengths: Indices | None = None
    keys: Sequence[Hashable] | None = None


class Chunk(Protocol):
    """Part of a data set in memory. Its sequences are numbered from 0.

    Where copies of the minibatch count, as for text and images, all chunks of a deserializer have
    the method ``assemble(parts, seed)`` as well. It decodes sequences of several chunks, a
    `ChunkPart` of each, and returns the streams in the order of the places, which are 0, 1, ...
    over all parts.
    """

    def sequences(self, indices: Indices, seed: Seed) -> Mapping[str, StreamData]:
        """Decode some sequences, in the order of ``indices``: by stream name, their samples.

        Called by several threads at once, on each rank for its part of each minibatch, so decode
        only these. ``indices`` has at least one, and one may occur twice. Random transforms draw
        from a generator made of ``seed`` and the number of the sequence in the whole data set, and
        from nothing else: then a sample is the same on any number of ranks and after a restart.

        Raises DataError: a sequence cannot be read; names file, line and column.
        """


class ChunkPart(NamedTuple):
    """Some sequences of a chunk, and their places among the sequences of a minibatch."""

    chunk: Any
    indices: Indices
    places: Indices


class Deserializer(Protocol):
    """Reads a data set of one format in chunks. Local; all ranks make the same one.

    Chunks are the unit of reading: a source has those of its window in memory and drops each one
    later. So a chunk should be large enough to read fast and small beside the memory, such as 32
    MB. A deserializer whose decoding takes much longer than reading, as that of images, has the
    attribute ``is_parallel = True``; sources then decode in several threads. Its ``repr`` names
    its file: it is in the messages of errors.

    A deserializer that knows of which streams a minibatch has lengths has the method
    ``has_one_sample()``: by stream name, whether each sequence of the whole data set has one
    sample. Whether a stream has lengths is then the same in all minibatches and partitions, where
    a part may have no sequence, or by chance only those of one sample.
    """

    def stream_infos(self) -> list[StreamInformation]:
        """The streams, each with a name of its own."""

    def num_chunks(self) -> int:
        """The number of chunks."""

    def chunk_infos(self) -> Sequence[ChunkInfo]:
        """What is known of each chunk; fast, from an index."""

    def get_chunk(self, chunk_id: int) -> Chunk:
        """Read a chunk. Called by a thread that reads ahead, several times over the sweeps."""


def has_one_sample(deserializer: Deserializer) -> dict[str, bool]:
    """Of the streams of which the deserializer says it."""
    known = getattr(deserializer, "has_one_sample", None)
    return {} if known is None else dict(known())


class InfosOnDemand(Sequence[ChunkInfo]):
    """What is known of each chunk is found when it is asked for, not for all at once."""

    def __init__(self, num_chunks: Callable[[], int], info: Callable[[int], ChunkInfo]) -> None:
        self._num_chunks = num_chunks
        self._info = info

    def __len__(self) -> int:
        return self._num_chunks()

    def __getitem__(self, chunk_id: Any) -> Any:
        if isinstance(chunk_id, slice):
            return [self._info(number) for number in range(*chunk_id.indices(len(self)))]
        if not 0 <= chunk_id < len(self):
            raise IndexError(chunk_id)
        return self._info(chunk_id)

    def __iter__(self) -> Iterator[ChunkInfo]:
        return (self._info(number) for number in range(len(self)))


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


_ARRAYS = (
    "Convert the files once, with a library that reads them, to arrays for MinibatchSourceFromData "
    "or to a CTF file; or write a UserDeserializer around that library."
)


def CBFDeserializer(*_: object, **__: object) -> NoReturn:
    """CNTK's binary format, which only CNTK writes. Raises UnsupportedError.

    >>> torchmn.cntk.readers.CBFDeserializer("train.cbf")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchmn.errors.UnsupportedError: ...
    """
    raise UnsupportedError(
        "CNTK's binary format (CBF) is not read. Give the CTF text that the file was made from to "
        "CTFDeserializer, which parses it faster than CNTK does. Where samples should be in memory "
        "as numbers, torchmn.scatter_dataset packs them once for all ranks of a node."
    )


def HTKFeatureDeserializer(*_: object, **__: object) -> NoReturn:
    """Acoustic features of HTK. Raises UnsupportedError.

    >>> torchmn.cntk.readers.HTKFeatureDeserializer()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchmn.errors.UnsupportedError: ...
    """
    raise UnsupportedError(f"Acoustic features of HTK are not read. {_ARRAYS}")


def HTKMLFDeserializer(*_: object, **__: object) -> NoReturn:
    """Label files of HTK. Raises UnsupportedError.

    >>> torchmn.cntk.readers.HTKMLFDeserializer()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchmn.errors.UnsupportedError: ...
    """
    raise UnsupportedError(f"Label files of HTK are not read. {_ARRAYS}")


def LatticeDeserializer(*_: object, **__: object) -> NoReturn:
    """Lattices of HTK. Raises UnsupportedError.

    >>> torchmn.cntk.readers.LatticeDeserializer()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchmn.errors.UnsupportedError: ...
    """
    raise UnsupportedError(f"Lattices are not read. {_ARRAYS}")
