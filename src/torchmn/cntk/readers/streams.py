"""Streams: what a deserializer is asked for, and what it has."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch

from torchmn.errors import UnknownNameError, UsageError

Value = TypeVar("Value")


class Record(Mapping[str, Value], Generic[Value]):
    """Named values, read as attributes or by name.

    >>> Record(features=1, labels=2).labels
    2
    """

    def __init__(self, /, **values: Value) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Value:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"No {name!r} here. There are: {', '.join(self)}.")
        return self._values[name]

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return _record_of, (type(self), self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.items())})"


def _record_of(kind: type[Record[Any]], values: dict[str, Any]) -> Record[Any]:
    return kind(**values)


@dataclass(frozen=True)
class StreamDef:
    """What to read as one stream. CNTK's arguments, in CNTK's order.

    Args:
        field: the name of the input in the file; None for the stream's own name.
        shape: of one sample; an int is one dimension.
        is_sparse: the file has ``index:value`` pairs.
        transforms: for images, in order.
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
        name: of the stream.
        stream_id: its number in the deserializer.
        storage_format: ``"dense"`` or ``"sparse"``.
        dtype: of the values; float32, as in CNTK, unless a deserializer of your own has another.
        shape: of one sample. A sparse sample has one dimension.
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
        if self.storage_format not in ("dense", "sparse"):
            raise UnknownNameError("storage_format", self.storage_format, ("dense", "sparse"))
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


InputMap = Mapping[Any, "StreamInformation | str"]
"""A stream, or its name, for each key of a minibatch."""


def wanted_streams(
    input_map: InputMap | None, streams: Mapping[str, StreamInformation]
) -> dict[Any, StreamInformation]:
    """The stream for each key; None: all streams.

    Raises UsageError: the map is no dict, or names a stream that is not there.
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
        if name not in streams:
            raise UnknownNameError("stream", name, streams)
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
