"""The interface of deserializers, which read a data set with its streams in chunks."""

import functools
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
import torch

from torchmn.base.errors import UnsupportedError, UsageError, raise_if_unknown

Value = TypeVar("Value")


class Record(Mapping[str, Value], Generic[Value]):
    """Named values, read as attributes or by name.

    >>> Record(features=1, labels=2).labels
    2
    """

    def __init__(self, /, **values: Value) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Value:
        values: dict[str, Value] = self.__dict__.get("_values", {})  # none yet in a copy
        if name not in values:
            raise AttributeError(f"No {name!r} here. There are: {', '.join(values)}.")
        return values[name]

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.items())})"


@dataclass(frozen=True)
class StreamDef:
    """The definition of one stream. The arguments are CNTK's, in CNTK's order.

    Args:
        field: the name of the input in the file; None for the stream's own name.
        shape: the shape of one sample; an int is one dimension.
        is_sparse: the file has ``index:value`` pairs.
        transforms: transforms of images, in order.
        context: frames to the left and to the right that are joined to each frame.
        scp: the script file of acoustic features.
        mlf: the label file of acoustic features.
        broadcast: the sequence has one sample, which is repeated for each frame.
        defines_mb_size: the minibatch size counts the samples of this stream; without such a
            stream, those of the longest one of each sequence.
        max_sequence_length: longer sequences are refused.

    Example:
        >>> StreamDef(field="image", shape=(3, 32, 32)).sample_shape
        (3, 32, 32)
    """

    field: str | None = None
    shape: int | Sequence[int] | None = None
    is_sparse: bool = False
    transforms: Sequence[Any] | None = None
    context: tuple[int, int] | None = None
    scp: str | Sequence[str] | None = None
    mlf: str | Sequence[str] | None = None
    broadcast: bool | None = None
    defines_mb_size: bool = False
    max_sequence_length: int = 65535

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """``shape`` as a tuple; ``()`` for None."""
        return as_shape(self.shape)


class StreamDefs(Record[StreamDef]):
    """Stream definitions by the names that the source gives the streams.

    >>> StreamDefs(labels=StreamDef(field="label", shape=10)).labels.sample_shape
    (10,)
    """


@dataclass(frozen=True)
class StreamInformation:
    """One stream of a source: what the samples in a minibatch look like.

    Args:
        name: the name of the stream.
        stream_id: its number in the deserializer.
        storage_format: ``"dense"`` or ``"sparse"``.
        dtype: the dtype of the values; float32, as in CNTK, unless your deserializer has another.
        shape: the shape of one sample. A sparse sample has one dimension.
        defines_mb_size: see `StreamDef`.

    Example:
        >>> StreamDefs(x=StreamDef(field="x", shape=3)).x.sample_shape
        (3,)
    """

    name: str
    stream_id: int = 0
    storage_format: Literal["dense", "sparse"] = "dense"
    dtype: Any = np.float32
    shape: tuple[int, ...] = ()
    defines_mb_size: bool = False

    def __post_init__(self) -> None:
        raise_if_unknown("storage_format", self.storage_format, ("dense", "sparse"))
        object.__setattr__(self, "shape", as_shape(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.is_sparse and len(self.shape) != 1:
            raise UsageError(
                f"The sparse stream {self.name!r} has the shape {self.shape}. A sparse sample has "
                f"one dimension: shape=({math.prod(self.shape)},)."
            )

    @property
    def is_sparse(self) -> bool:
        """Whether minibatches have a ``torch.sparse_csr`` tensor of this stream."""
        return self.storage_format == "sparse"


# A stream, or its name, for each key of a minibatch.
InputMap = Mapping[Any, "StreamInformation | str"]


def wanted_streams(
    input_map: InputMap | None, streams: Mapping[str, StreamInformation]
) -> dict[Any, StreamInformation]:
    """The stream for each key; None: all streams.

    Raises UsageError: the map is not a dict, or names a stream that does not exist.
    """
    if input_map is None:
        return {stream: stream for stream in streams.values()}
    if not isinstance(input_map, Mapping):
        every = ", ".join(f"{name!r}: source.streams.{name}" for name in streams)
        raise UsageError(
            f"The map of streams is of type {type(input_map).__name__}. It must be a dict of the "
            f"source's streams by the names of the model's inputs. Give {{{every}}}, with keys of "
            "your own."
        )
    wanted = {}
    for key, stream in input_map.items():
        name = stream.name if isinstance(stream, StreamInformation) else stream
        raise_if_unknown("stream", name, streams)
        wanted[key] = streams[name]
    return wanted


def as_shape(shape: int | Sequence[int] | None) -> tuple[int, ...]:
    """The shape of a sample as a tuple. Raises UsageError: a size is below 1."""
    if shape is None:
        return ()
    sizes = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
    if any(size < 1 for size in sizes):
        raise UsageError(f"The shape of a sample is {shape}. Its sizes must be at least 1.")
    return sizes


def csr_tensor(
    crow: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, size: tuple[int, int]
) -> torch.Tensor:
    """A ``torch.sparse_csr`` tensor of indices that are known to be valid."""
    _ask_for_the_warning_once()
    return torch.sparse_csr_tensor(crow, columns, values, size, check_invariants=False)


@functools.cache
def _ask_for_the_warning_once() -> None:
    """PyTorch warns in each process that such tensors are a beta feature, which is our choice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
        torch.sparse_csr_tensor(nothing.new_zeros(1), nothing, nothing.float(), (0, 1))


Indices = np.ndarray[Any, np.dtype[np.int64]]

# The samples of several sequences one after another, dense ``(num_samples, *shape)`` or sparse CSR
# ``(num_samples, dimension)``, and the lengths of the sequences as int64 ``(num_sequences,)``; None
# where each sequence has one sample.
StreamData = tuple[torch.Tensor, torch.Tensor | None]

Seed = tuple[int, int]  # the seed of the source and the sweep


@dataclass(frozen=True, kw_only=True)
class ChunkInfo:
    """Numbers of a chunk that are known without reading it.

    Args:
        num_sequences: number of sequences.
        num_samples: number of samples, as the minibatch size counts them: those of the stream that
            defines the minibatch size, or of the longest stream of each sequence.
        lengths: samples of each sequence, counted in the same way, ``(num_sequences,)``; None if
            each has one.
        keys: keys of the sequences, by which several deserializers are joined; None: by position.

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
        """The `ChunkInfo` of each chunk; fast, from an index."""

    def get_chunk(self, chunk_id: int) -> Chunk:
        """Read a chunk. Called by a thread that reads ahead, several times over the sweeps."""


def has_one_sample(deserializer: Deserializer) -> dict[str, bool]:
    """The result of a deserializer's ``has_one_sample``; empty if it has no such method."""
    known = getattr(deserializer, "has_one_sample", None)
    return {} if known is None else dict(known())


class InfosOnDemand(Sequence[ChunkInfo]):
    """A sequence of `ChunkInfo` in which each is made when it is asked for."""

    def __init__(self, num_chunks: Callable[[], int], info: Callable[[int], ChunkInfo]) -> None:
        self._num_chunks = num_chunks
        self._info = info

    def __len__(self) -> int:
        return self._num_chunks()

    def __getitem__(self, chunk_id: Any) -> Any:
        if not 0 <= chunk_id < len(self):
            raise IndexError(chunk_id)  # also ends an iteration: a Sequence iterates by index
        return self._info(chunk_id)


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
