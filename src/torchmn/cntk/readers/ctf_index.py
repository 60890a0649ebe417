"""The index of a CTF file: where its chunks are, and the sequences of each."""

import mmap
import os
import time
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from torchmn.base.errors import DataError
from torchmn.cluster.units import KiB, MiB
from torchmn.cntk.readers.ctf_parse import Columns, Sequences, Table, has_ids, scan
from torchmn.cntk.readers.deserializer import ChunkInfo
from torchmn.cntk.readers.files import open_file

Array = np.ndarray[Any, Any]

MAX_SEQUENCE_BYTES = 256 * MiB
_MAX_INDEX_BYTES = 16 * MiB
_MIN_AGE_S = 2.0  # of a file, from which on its time tells whether it has changed

Version = tuple[int, ...]


@dataclass(frozen=True)
class ChunkPlace:
    """The place of a chunk in the file, and its first line, counted from 1.

    ``sequences`` is None where the index would become too large; ``has_one`` says by stream whether
    each sequence has one sample.
    """

    offset: int
    nbytes: int
    line: int
    info: ChunkInfo
    sequences: Sequences | None
    has_one: Array


@dataclass(frozen=True)
class Index:
    """The chunks of a file. ``version`` is None if the file may change without being noticed."""

    path: str
    columns: Columns
    chunks: tuple[ChunkPlace, ...]
    with_ids: bool
    version: Version | None

    def read(self, place: ChunkPlace) -> tuple[Array, Sequences]:
        """The text of a chunk and its sequences. Raises DataError: the file has changed."""
        with open_file(self.path, buffering=0) as file:
            is_as_indexed = self.version is not None and _version(file) == self.version
            text = _read(file, self.path, place.offset, _pages(place.nbytes))
        sequences = place.sequences if is_as_indexed else None
        if sequences is None:
            table = scan(text, self.columns, self.with_ids)
            sequences = table.first(table.num_sequences)
            is_as_indexed = (
                table.num_sequences == place.info.num_sequences
                and int(self.columns.samples_of(table.counts).sum()) == place.info.num_samples
            )
        if len(text) != place.nbytes or not is_as_indexed:
            raise DataError(
                f"{self.path}: the file has changed since it was first read: "
                f"{place.nbytes} bytes from {place.offset} on are no longer the same. Write new "
                "data to a new file and start again."
            )
        return text, sequences


def make_index(path: str, columns: Columns, chunk_bytes: int, skip_ids: bool) -> Index:
    """Read a file once to find its chunks. Raises DataError: it has no samples, or is wrong."""
    chunks: list[ChunkPlace] = []
    with open_file(path, buffering=0) as file:
        version, size = _version(file), os.fstat(file.fileno()).st_size
        offset = _begin_of_text(file, path)
        with_ids: bool | None = False if skip_ids else None
        line, nbytes = 1, chunk_bytes
        into, kept_bytes = np.empty(0, np.uint8), 0
        while offset < size:
            is_last = offset + nbytes >= size
            if len(into) < min(nbytes, size - offset):
                into = _pages(min(nbytes, size - offset))
            text = _read(file, path, offset, into[:nbytes])
            if not is_last:
                text = text[: _end_of_lines(text)]
            if with_ids is None and len(text):
                with_ids = has_ids(text)
            table = scan(text, columns, bool(with_ids))
            num, end, num_lines = table.num_sequences, len(text), table.num_lines
            if not is_last and with_ids:  # the last sequence may continue
                num = max(num - 1, 0)
                end = int(table.begins[num]) if num else 0
                num_lines = int(table.lines[num]) if num else 0
            if end == 0 and not is_last:
                if nbytes >= MAX_SEQUENCE_BYTES:
                    raise DataError(
                        f"{path}, line {line}: the sequence that begins here has more than "
                        f"{MAX_SEQUENCE_BYTES} bytes of text. Is it text with a line per sample, "
                        "and do ids differ between sequences?"
                    )
                nbytes = min(2 * nbytes, MAX_SEQUENCE_BYTES)
                continue
            if num:
                info = _info_of(table, num, bool(with_ids), path, columns, line)
                sequences = table.first(num)
                kept_bytes += sequences.nbytes
                kept = sequences if kept_bytes <= _MAX_INDEX_BYTES else None
                has_one = (table.counts[:num] == 1).all(axis=0)
                chunks.append(ChunkPlace(offset, end, line, info, kept, has_one))
            offset, line, nbytes = offset + end, line + num_lines, chunk_bytes
        if _version(file) != version:  # written to meanwhile: chunks are then scanned at each read
            version = None
    if not chunks:
        fields = ", ".join(f"|{name}" for name in columns.fields)
        raise DataError(f"{path}: the file has no samples. Its lines should have {fields}.")
    return Index(path, columns, tuple(chunks), bool(with_ids), version)


def _info_of(
    table: Table, num: int, with_ids: bool, path: str, columns: Columns, line: int
) -> ChunkInfo:
    """Describe the first ``num`` sequences of a table, which begins at ``line`` of the file."""
    counts = table.counts[:num]
    for stream, limit in enumerate(columns.max_lengths):
        longer = np.flatnonzero(counts[:, stream] > limit)
        if longer.size:
            first = int(longer[0])
            raise DataError(
                f"{path}, line {line + int(table.lines[first])}: a sequence with "
                f"{counts[first, stream]} samples of {columns.fields[stream]!r} begins "
                f"here, and max_sequence_length of its StreamDef is {limit}. Raise it, or "
                "give shorter sequences ids of their own."
            )
    samples = columns.samples_of(counts)
    return ChunkInfo(
        num_sequences=num,
        num_samples=int(samples.sum()),
        lengths=None if (samples == 1).all() else samples,
        keys=table.ids[:num].copy() if with_ids else None,  # type: ignore[arg-type]
    )


# ---- the file


def _version(file: BinaryIO) -> Version | None:
    """A stamp that differs after the file has changed; None if it has changed just now.

    Two changes within a tick of the file system's clock have the same time.
    """
    status = os.fstat(file.fileno())
    if abs(time.time() - status.st_mtime) < _MIN_AGE_S:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _begin_of_text(file: BinaryIO, path: str) -> int:
    head = _read(file, path, 0, np.empty(3, np.uint8)).tobytes()
    if head[:2] in (BOM_UTF16_LE, BOM_UTF16_BE):
        raise DataError(f"{path}: the file is UTF-16; CTF is UTF-8. Convert it.")
    return len(BOM_UTF8) if head == BOM_UTF8 else 0


def _end_of_lines(text: Array) -> int:
    """The offset at which the last whole line ends; 0 if there is none."""
    for begin in (max(len(text) - 64 * KiB, 0), 0):  # a copy of all of it only for long lines
        if (found := text[begin:].tobytes().rfind(b"\n")) >= 0:
            return begin + found + 1
    return 0


def _pages(nbytes: int) -> Array:
    """Allocate memory that is returned to the system when freed; that of malloc may not be."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8)


def _read(file: BinaryIO, path: str, offset: int, into: Array) -> Array:
    """Read bytes from an offset on, to fill ``into``; fewer at the end of the file."""
    view, filled = memoryview(into.data), 0
    try:
        file.seek(offset)
        while filled < len(into):
            count = file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                break
            filled += count
    except OSError as error:
        raise DataError(f"{path}: reading at byte {offset} failed: {error.strerror}.") from error
    return into[:filled]
