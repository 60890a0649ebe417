"""A file of tensors in the safetensors format, written from and read into given memory.

    8 bytes   n, the size of the header, little-endian
    n bytes   JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    the rest  the tensors' bytes, without gaps

https://huggingface.co/docs/safetensors. Its package reads these files but is not used here: it
makes another copy of every tensor, does not sync, and does not verify checksums. A dtype that the
format lacks is written as bytes; the description of the state has the dtype.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchmn.base.errors import DataError
from torchmn.checkpoint.storage import FileReader
from torchmn.comm.checksums import digest

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_LENGTH_NBYTES = 8
_MAX_HEADER_NBYTES = 100_000_000  # as in the format's own reader


@dataclass(frozen=True)
class TensorEntry:
    """Description of a tensor in a file; ``dtype`` is torch's name, such as ``float32``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    nbytes: int


def in_file_order(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Sort by element size, largest first: each tensor begins at a multiple of its element size."""
    return sorted(entries, key=lambda entry: -_itemsize(entry.dtype))


def header_of(entries: Sequence[TensorEntry]) -> bytes:
    """Encode the header, with its length, of a file that has these tensors in this order."""
    table, begin = {}, 0
    for entry in entries:
        known = entry.dtype in _DTYPES
        table[entry.name] = {
            "dtype": _DTYPES.get(entry.dtype, "U8"),
            "shape": list(entry.shape) if known else [entry.nbytes],
            "data_offsets": [begin, begin + entry.nbytes],
        }
        begin += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data; the format allows spaces at the end
    return len(text).to_bytes(_LENGTH_NBYTES, "little") + text


class ShardReader:
    """Reads tensors from one file. Local. Raises DataError: the file is damaged or unreadable."""

    def __init__(self, file: FileReader, name: str, header_checksum: str) -> None:
        self._file = file
        self._name = name
        length = memoryview(bytearray(_LENGTH_NBYTES))
        file.read_into(0, length)
        nbytes = int.from_bytes(length, "little")
        # A damaged length must be found before memory of that size is allocated.
        if nbytes > min(_MAX_HEADER_NBYTES, file.nbytes - _LENGTH_NBYTES):
            raise DataError(f"{name} is damaged: its header claims {nbytes} bytes")
        header = memoryview(bytearray(nbytes))
        file.read_into(_LENGTH_NBYTES, header)
        if digest(length, header) != header_checksum:
            raise DataError(f"{name} is damaged: its header does not match its checksum")
        self._begin = _LENGTH_NBYTES + nbytes
        self._places = _places(name, bytes(header))

    def read(self, tensor: str, checksum: str) -> Tensor:
        """Read the bytes of a tensor into new memory, shape ``(nbytes,)``."""
        if tensor not in self._places:
            raise DataError(f"{self._name} has no tensor '{tensor}'")
        begin, end = self._places[tensor]
        if not 0 <= begin <= end <= self._file.nbytes - self._begin:
            raise DataError(f"{self._name} ends before its tensor '{tensor}'")
        try:
            # torch reports memory that it cannot allocate as RuntimeError, not as MemoryError.
            memory = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise DataError(
                f"'{tensor}' in {self._name}, of {end - begin} bytes, does not fit into memory"
            ) from error
        self._file.read_into(self._begin + begin, memory.numpy().data)
        if digest(memory) != checksum:
            raise DataError(f"{self._name} is damaged: '{tensor}' does not match its checksum")
        return memory

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _places(name: str, header: bytes) -> dict[str, tuple[int, int]]:
    """The (begin, end) offsets of each tensor, in bytes after the header."""
    try:
        table = json.loads(header)
        return {
            tensor: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for tensor, entry in table.items()
            if tensor != "__metadata__"
        }
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,  # JSON has Infinity, and int() has not
        RecursionError,
    ) as error:
        raise DataError(f"{name} does not have a safetensors header: {error}") from error


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
