"""A map-style data set as bytes in one block of memory, and a data set that reads it.

Two layouts:

- *stacked*: all samples have the same structure: a tensor, an array or a number, or a tuple, list
  or dict of them, each with the same dtype and shape in every sample. Field f of all samples is one
  array ``(num_samples, *shape_f)``, so a sample is a view and nothing is copied or decoded.
- *encoded*: anything else, such as texts or sequences of different lengths. Samples are stored one
  after another, encoded as messages of the communicators; a table has their offsets.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from torchmn.base.errors import DataError, TorchmnError, UnsupportedError
from torchmn.cluster.units import GiB
from torchmn.comm import object_codec
from torchmn.comm.transports.shared_segment import (
    SHARED_DIRECTORY,
    ErrorContext,
    SharedMemorySegment,
    memory_error_from,
)
from torchmn.data.sub_dataset import SizedDataset, is_starting_process

COPY = ErrorContext(
    "the node's copy of the data set",
    "Make the folder larger (docker: --shm-size), or pass shared_directory= a folder on a local "
    "disk, or pass the data set on every rank, so that only the index is sent.",
)

Kind = Literal["tensor", "array", "scalar", "bool", "int", "float"]

_ALIGNMENT = 64
_RESERVE_BYTES = GiB  # about one second of zeroing pages between two heartbeats
_NUMBERS: dict[type, tuple[Kind, str]] = {
    bool: ("bool", "|b1"),
    int: ("int", "<i8"),
    float: ("float", "<f8"),
}


@dataclass(frozen=True)
class Field:
    """One field of each sample: values of ``dtype``, shape ``shape``."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def stored(self) -> np.dtype[Any]:
        """The numpy type in a row; integers for tensors, since numpy lacks some of their dtypes."""
        if self.kind != "tensor":
            return np.dtype((self.dtype, self.shape))
        size = torch.empty(0, dtype=getattr(torch, self.dtype), device="cpu").element_size()
        integers = min(size, 8)
        return np.dtype((f"<i{integers}", (math.prod(self.shape) * size // integers,)))

    def value(self, column: Any, index: int) -> Any:
        """The value of the field in one sample; tensors and arrays are views."""
        stored = column[index, ...] if self.kind == "array" else column[index]
        if self.kind == "tensor":
            return torch.from_numpy(stored).view(getattr(torch, self.dtype)).view(self.shape)
        return stored if self.kind in ("array", "scalar") else stored.item()


@dataclass(frozen=True)
class Layout:
    """The memory layout. ``container`` is the structure of a stacked sample.

    ``encoded`` samples have no fields; ``table`` is the offset of their ``num_samples + 1`` starts
    (int64).
    """

    num_samples: int
    container: Literal["bare", "tuple", "list", "dict", "encoded"]
    keys: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    table: int = 0

    @property
    def row(self) -> np.dtype[Any]:
        """The type of one stacked sample."""
        return np.dtype(
            [(str(number), field.stored) for number, field in enumerate(self.fields)], align=True
        )

    def rows(self, memory: Any) -> np.ndarray[Any, Any]:
        """All stacked samples in a buffer."""
        row = self.row
        if row.itemsize * self.num_samples == 0:
            return np.empty(self.num_samples, row)
        return np.frombuffer(memory, row, self.num_samples)


class PackedSamples(Dataset[Any]):
    """The samples in a node's shared memory. Local.

    Tensors and arrays are views of a private, copy-on-write mapping: all processes read the same
    pages, and changing a sample in place affects only the process that does.

    Processes started by this one, such as those of a DataLoader, use the same memory. Any other
    pickle contains the samples themselves and can be opened anywhere.

    Args:
        memory: where the samples are.
        layout: the layout of the memory.
        trust: whether and how samples that were pickled may be unpickled.
        held: the ascending indices of the samples in ``memory``; None for all.
        length: the number of all samples if ``memory`` has only a part.
    """

    def __init__(
        self,
        memory: SharedMemorySegment | bytearray,
        layout: Layout,
        trust: object_codec.Trust,
        held: np.ndarray[Any, Any] | None = None,
        length: int | None = None,
    ) -> None:
        self.memory = memory
        self.layout = layout
        self._trust = trust
        self._held = held
        self._length = layout.num_samples if length is None else length
        self._map: Any = memory if isinstance(memory, bytearray) else bytearray()
        if isinstance(memory, SharedMemorySegment) and memory.size:
            self._map = memory.map_private()
        self._rows = layout.rows(self._map)
        self._columns = [self._rows[name] for name in self._rows.dtype.names or ()]
        self._starts = np.zeros(1, np.int64)
        if layout.container == "encoded":
            self._starts = np.frombuffer(
                self._map, np.int64, count=layout.num_samples + 1, offset=layout.table
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"Sample {index} of a data set with {len(self)} samples.")
        row = self._row(position)
        if self.layout.container == "encoded":
            return _decode(self._message(row), self._trust)
        values = [
            field.value(column, row)
            for field, column in zip(self.layout.fields, self._columns, strict=True)
        ]
        if self.layout.container == "bare":
            return values[0]
        if self.layout.container == "dict":
            return dict(zip(self.layout.keys, values, strict=True))
        return tuple(values) if self.layout.container == "tuple" else values

    def only(self, indices: Sequence[int]) -> PackedSamples:
        """A copy in its own memory with these samples only, under the same indices."""
        held = np.unique(np.asarray(indices, np.int64))
        rows = np.array([self._row(int(index)) for index in held], np.int64)
        if self.layout.container == "encoded":
            content, layout = _joined([self._message(int(row)) for row in rows])
        else:
            content = bytearray(self._rows[rows].tobytes())
            layout = replace(self.layout, num_samples=len(rows))
        # The receiver of the pickle trusts it already, so it does not contain the secret.
        trust = object_codec.Trust(is_private=True)
        return PackedSamples(content, layout, trust, held, len(self))

    def _row(self, index: int) -> int:
        """The position of a sample in this memory."""
        if self._held is None:
            return index
        row = int(np.searchsorted(self._held, index))
        if row == len(self._held) or self._held[row] != index:
            raise IndexError(
                f"Sample {index} is not in this copy, which has only {len(self._held)} of "
                f"{len(self)} samples."
            )
        return row

    def _message(self, row: int) -> memoryview:
        return memoryview(self._map)[int(self._starts[row]) : int(self._starts[row + 1])]

    def __reduce__(self) -> tuple[object, ...]:
        if is_starting_process():
            held = (self._held, self._length)
            return PackedSamples, (self.memory, self.layout, self._trust, *held)
        copy = self if isinstance(self.memory, bytearray) else self.only(range(len(self)))
        held = (copy._held, copy._length)
        return PackedSamples, (copy.memory, copy.layout, copy._trust, *held)

    def __deepcopy__(self, memo: dict[int, object]) -> PackedSamples:
        memory = self.memory
        if isinstance(memory, bytearray):
            memory = bytearray(memory)
        return PackedSamples(memory, self.layout, self._trust, self._held, self._length)


def pack_dataset(
    dataset: SizedDataset[Any],
    trust: object_codec.Trust,
    directory: str = SHARED_DIRECTORY,
    progress: Callable[[], None] = lambda: None,
) -> tuple[SharedMemorySegment, Layout]:
    """Read every sample of a data set once and write it to new shared memory. Local.

    ``progress`` is called after every sample.

    Raises:
        DataError: the data set raised an exception; the message names the sample.
        SharedMemoryError: the memory is too small.
        UnsupportedError: a sample has a CUDA tensor, or needs pickle without a secret.
    """
    length = len(dataset)
    read = _Reader(dataset)
    shape = _shape_of(read(0) if length else ())
    if shape is None:
        return _pack_encoded(read, length, trust, directory, progress)
    memory, layout, num_packed = _pack_stacked(read, length, shape, directory, progress)
    if num_packed == length:
        return memory, layout
    packed = PackedSamples(memory, layout, trust)

    def read_on(index: int) -> Any:
        return packed[index] if index < num_packed else read(index)

    return _pack_encoded(read_on, length, trust, directory, progress)


class _Reader:
    """Reads samples, and keeps the last one, which is not read again if the layout changes."""

    def __init__(self, dataset: SizedDataset[Any]) -> None:
        self._dataset = dataset
        self._last: tuple[int, Any] = (-1, None)

    def __call__(self, index: int) -> Any:
        if index != self._last[0]:
            try:
                self._last = (index, self._dataset[index])
            except Exception as error:
                raise DataError(
                    f"The data set failed at sample {index} of {len(self._dataset)}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return self._last[1]


# ---- stacked


def _shape_of(sample: Any) -> Layout | None:
    """The layout of one stacked sample, without offsets; None if it has to be encoded."""
    container, keys, values = _fields_of(sample)
    fields = tuple(_field_of(value) for value in values)
    if any(field is None for field in fields):
        return None
    return Layout(0, container, keys, fields)  # type: ignore[arg-type]


def _fields_of(sample: Any) -> tuple[Any, tuple[str, ...], Sequence[Any]]:
    if type(sample) in (tuple, list):
        return type(sample).__name__, (), sample
    if type(sample) is dict and all(type(key) is str for key in sample):
        return "dict", tuple(sample), tuple(sample.values())
    return "bare", (), (sample,)


def _field_of(value: Any) -> Field | None:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise UnsupportedError(
                f"A sample has a tensor on {value.device}. A scattered data set is stored in the "
                "node's memory: move its tensors to the CPU and each batch to the device."
            )
        if value.layout != torch.strided or value.is_quantized:
            return None
        return Field("tensor", str(value.dtype).removeprefix("torch."), tuple(value.shape))
    if isinstance(value, (np.ndarray, np.generic)):
        kind: Kind = "array" if isinstance(value, np.ndarray) else "scalar"
        if value.dtype.names is not None:
            raise UnsupportedError(
                f"A sample has a structured array ({value.dtype}). Pass its fields as a dict of "
                "arrays."
            )
        if value.dtype.hasobject or value.dtype.itemsize == 0:
            return None
        return Field(kind, value.dtype.str, value.shape)
    if type(value) in _NUMBERS:
        if type(value) is int and not -(2**63) <= value < 2**63:
            return None
        return Field(*_NUMBERS[type(value)])
    return None


def _pack_stacked(
    read: Callable[[int], Any],
    length: int,
    shape: Layout,
    directory: str,
    progress: Callable[[], None],
) -> tuple[SharedMemorySegment, Layout, int]:
    """Pack samples of equal shapes, up to one that differs from sample 0; return also how many."""
    layout = replace(shape, num_samples=length)
    end = layout.row.itemsize * length
    memory = SharedMemorySegment.create(end, COPY, directory)
    try:
        # Where the folder is full, allocating raises, but writing to mapped memory is a SIGBUS.
        for begin in range(0, end, _RESERVE_BYTES):
            memory.reserve(begin, min(begin + _RESERVE_BYTES, end))
            progress()
    except OSError as error:
        raise memory_error_from(error, end, directory, COPY) from error
    rows = layout.rows(memory.map_shared() if end else b"")
    for index in range(length):
        sample = read(index)
        if _shape_of(sample) != shape:
            return memory, layout, index
        for name, value in zip(rows.dtype.names or (), _fields_of(sample)[2], strict=True):
            column = rows[name]
            if isinstance(value, torch.Tensor):
                value = object_codec.as_bytes(value.detach()).numpy().view(column.dtype)
            column[index] = value
        progress()
    return memory, layout, length


# ---- encoded


def _pack_encoded(
    read: Callable[[int], Any],
    length: int,
    trust: object_codec.Trust,
    directory: str,
    progress: Callable[[], None],
) -> tuple[SharedMemorySegment, Layout]:
    memory = SharedMemorySegment.create(0, COPY, directory)
    starts = np.zeros(length + 1, np.int64)
    end = 0
    try:
        for index in range(length):
            payload = _encode(read(index), index, trust)
            starts[index] = end
            memory.append(payload)
            end += len(payload)
            progress()
        starts[length] = end
        table = -(-end // _ALIGNMENT) * _ALIGNMENT
        memory.append(bytes(table - end) + starts.tobytes())
    except OSError as error:
        raise memory_error_from(error, end, directory, COPY) from error
    return memory, Layout(length, "encoded", table=table)


def _joined(messages: Sequence[memoryview]) -> tuple[bytearray, Layout]:
    """Concatenated messages, and the table of their offsets."""
    starts = np.cumsum([0, *map(len, messages)], dtype=np.int64)
    content = bytearray().join(messages)
    content += bytes(-len(content) % _ALIGNMENT)
    layout = Layout(len(messages), "encoded", table=len(content))
    return content + starts.tobytes(), layout


def _encode(sample: Any, index: int, trust: object_codec.Trust) -> bytes:
    """Encode a sample as the length of its head (8 bytes), the head, and the tensors."""
    try:
        message = object_codec.pack(sample, trust)
    except TorchmnError as error:
        raise type(error)(f"Sample {index} of the data set cannot be sent: {error}") from error
    buffers = [object_codec.as_bytes(buffer.cpu()).numpy().tobytes() for buffer in message.buffers]
    return b"".join([struct.pack("<q", len(message.head)), message.head, *buffers])


def _decode(payload: memoryview, trust: object_codec.Trust) -> Any:
    (head_length,) = struct.unpack_from("<q", payload)
    at = 8 + head_length
    _, body, tensors = object_codec.unpack_head(bytes(payload[8:at]), torch.device("cpu"))
    for tensor in tensors:
        into = object_codec.as_bytes(tensor).numpy()
        into[:] = np.frombuffer(payload, np.uint8, count=len(into), offset=at)
        at += len(into)
    return object_codec.unpack(body, tensors, trust)
