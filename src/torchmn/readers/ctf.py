"""CTF, CNTK's text format: ``[id] |name value value |name index:value ...`` on each line."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import torch

from torchmn.errors import DataError, UsageError
from torchmn.readers.ctf_errors import describe
from torchmn.readers.deserializer import ChunkInfo, ChunkPart, Indices, Seed, StreamData
from torchmn.readers.files import open_file
from torchmn.readers.sparse import csr_tensor
from torchmn.readers.streams import StreamDef, StreamInformation
from torchmn.units import KiB, MiB

Array = np.ndarray[Any, Any]

MAX_SEQUENCE_BYTES = 256 * MiB
_MAX_DIMENSION = 2**31 - 1
_MAX_INDEX_BYTES = 16 * MiB
_MIN_AGE_S = 2.0  # of a file, from which on its time tells whether it has changed
_MIN_PAIR_BYTES = 4  # "1:1" and a blank
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class CTFDeserializer:
    """Reads a file of CNTK's text format. Local.

    Each line has samples of one or more inputs: ``|name 0.1 0.2`` is dense, ``|name 3:1 7:0.5``
    sparse. Neighbouring lines that begin with the same number are one sequence; without numbers
    each line is one. ``|# text`` is a comment, up to the next ``|`` or the end of the line.

    The first use reads the file once for an index of its chunks. Text is parsed when a minibatch
    needs it, by numba (``pip install 'torchmn[compression]'``) or else, 30 to 100 times slower, by
    Python.

    Args:
        filename: of the text, UTF-8 without further marks.
        streams: what to read, by stream name: `StreamDef` with ``shape`` and, unless it is the
            stream's name, ``field``, the name in the file. Other inputs of the file are ignored.
        max_errors: how many wrong sequences are left out, each with a warning, before a
            `DataError`; counted on each rank.
        chunk_bytes: of the text that is read at once. A longer sequence is a chunk of its own.
        skip_sequence_ids: each line is a sequence, also where lines begin with numbers.
        fill_with_zeros: a dense sample may end early, as CNTK permits; the rest is zero.

    Raises:
        DataError: the file cannot be read, or a line is wrong; names file, line and column.
        UsageError: a stream has no shape, or what text cannot have.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        streams: Mapping[str, StreamDef],
        *,
        max_errors: int = 0,
        chunk_bytes: int = 32 * MiB,
        skip_sequence_ids: bool = False,
        fill_with_zeros: bool = False,
    ) -> None:
        if max_errors < 0 or chunk_bytes < 1:
            raise UsageError(
                f"max_errors={max_errors} and chunk_bytes={chunk_bytes}: the first must be at "
                "least 0, the second at least 1."
            )
        self._path = os.fspath(filename)
        self._columns = _columns_of(streams)
        self._chunk_bytes = chunk_bytes
        self._skip_ids = skip_sequence_ids
        self._fill = fill_with_zeros
        self._lock = threading.Lock()
        self._index: _Index | None = None
        self._wrong = _WrongSequences(max_errors)

    def stream_infos(self) -> list[StreamInformation]:
        """The streams, in the order of ``streams``."""
        return list(self._columns.infos)

    def num_chunks(self) -> int:
        """The number of chunks; reads the file on the first call."""
        return len(self._indexed().chunks)

    def chunk_infos(self) -> Sequence[ChunkInfo]:
        """Sequences and samples of each chunk; reads the file on the first call."""
        return [chunk.info for chunk in self._indexed().chunks]

    def get_chunk(self, chunk_id: int) -> CTFChunk:
        """Read the text of a chunk and find its sequences."""
        index = self._indexed()
        place = index.chunks[chunk_id]
        with open_file(self._path, buffering=0) as file:
            is_as_indexed = index.version is not None and _version(file) == index.version
            text = _read(file, self._path, place.offset, _pages(place.nbytes))
        sequences = place.sequences if is_as_indexed else None
        if sequences is None:
            table = _scan(text, self._columns, index.with_ids)
            sequences = table.first(table.num_sequences)
            is_as_indexed = (
                table.num_sequences == place.info.num_sequences
                and int(self._columns.samples_of(table.counts).sum()) == place.info.num_samples
            )
        if len(text) != place.nbytes or not is_as_indexed:
            raise DataError(
                f"{self._path}: the file has changed since it was first read: "
                f"{place.nbytes} bytes from {place.offset} on are no longer the same. Write new "
                "data to a new file and start again."
            )
        return CTFChunk(self, place, text, sequences, index.with_ids)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _indexed(self) -> _Index:
        with self._lock:
            if self._index is None:
                self._index = self._make_index()
            return self._index

    def _make_index(self) -> _Index:
        chunks: list[_ChunkPlace] = []
        with open_file(self._path, buffering=0) as file:
            version, size = _version(file), os.fstat(file.fileno()).st_size
            head = _read(file, self._path, 0, np.empty(3, np.uint8)).tobytes()
            if head[:2] in _UTF16_MARKS:
                raise DataError(f"{self._path}: the file is UTF-16; CTF is UTF-8. Convert it.")
            offset = len(_UTF8_MARK) if head == _UTF8_MARK else 0
            with_ids: bool | None = False if self._skip_ids else None
            line, nbytes = 1, self._chunk_bytes
            into, kept_bytes = np.empty(0, np.uint8), 0
            while offset < size:
                is_last = offset + nbytes >= size
                if len(into) < min(nbytes, size - offset):
                    into = _pages(min(nbytes, size - offset))
                text = _read(file, self._path, offset, into[:nbytes])
                if not is_last:
                    text = text[: _end_of_lines(text)]
                if with_ids is None and len(text):
                    found = _kernels().has_ids(text)
                    with_ids = None if found < 0 else found == 1
                table = _scan(text, self._columns, bool(with_ids))
                num = table.num_sequences
                if not is_last and with_ids:
                    num -= 1  # which may continue
                    end = int(table.begins[num]) if num > 0 else 0
                    num_lines = int(table.lines[num]) if num > 0 else 0
                else:
                    end, num_lines = len(text), table.num_lines
                if end == 0 and not is_last:
                    if nbytes >= MAX_SEQUENCE_BYTES:
                        raise self._too_long(line)
                    nbytes = min(2 * nbytes, MAX_SEQUENCE_BYTES)
                    continue
                if num > 0:
                    info = self._info_of(table, num, bool(with_ids), line)
                    sequences = table.first(num)
                    kept_bytes += sequences.nbytes
                    kept = sequences if kept_bytes <= _MAX_INDEX_BYTES else None
                    chunks.append(_ChunkPlace(offset, end, line, info, kept))
                offset, line, nbytes = offset + end, line + num_lines, self._chunk_bytes
            if _version(file) != version:
                version = None
        if not chunks:
            fields = ", ".join(f"|{name}" for name in self._columns.fields)
            raise DataError(
                f"{self._path}: the file has no samples. Its lines should have {fields}."
            )
        return _Index(tuple(chunks), bool(with_ids), version)

    def _info_of(self, table: _Table, num: int, with_ids: bool, line: int) -> ChunkInfo:
        counts = table.counts[:num]
        for stream, limit in enumerate(self._columns.max_lengths):
            longer = np.flatnonzero(counts[:, stream] > limit)
            if longer.size:
                first = int(longer[0])
                raise DataError(
                    f"{self._path}, line {line + int(table.lines[first])}: a sequence with "
                    f"{counts[first, stream]} samples of {self._columns.fields[stream]!r} begins "
                    f"here, and max_sequence_length of its StreamDef is {limit}. Raise it, or "
                    "give shorter sequences ids of their own."
                )
        samples = self._columns.samples_of(counts)
        return ChunkInfo(
            num_sequences=num,
            num_samples=int(samples.sum()),
            lengths=None if (samples == 1).all() else samples,
            keys=table.ids[:num].copy() if with_ids else None,  # type: ignore[arg-type]
        )

    def _too_long(self, line: int) -> DataError:
        return DataError(
            f"{self._path}, line {line}: the sequence that begins here has more than "
            f"{MAX_SEQUENCE_BYTES} bytes of text. Is it text with a line per sample, and do ids "
            "differ between sequences?"
        )


class CTFChunk:
    """Text of a file in memory, and where its sequences are.

    Args:
        of: whose chunk it is.
        place: in the file.
        text: of the chunk.
        sequences: where they are in the text.
        with_ids: whether neighbouring lines with the same number are one sequence.
    """

    def __init__(
        self,
        of: CTFDeserializer,
        place: _ChunkPlace,
        text: Array,
        sequences: _Sequences,
        with_ids: bool,
    ) -> None:
        self.of = of
        self.place = place
        self.text = text
        self.begins = sequences.begins
        self.counts = sequences.counts
        self.has_one = None if self.counts is None else (self.counts == 1).all(axis=0)
        """By stream, whether each sequence has one sample of it; None: of every stream."""
        self.with_ids = with_ids

    def sequences(self, indices: Indices, seed: Seed) -> Mapping[str, StreamData]:
        """Parse some sequences. One that is wrong, and left out, has length 0 in all streams."""
        return self.assemble([ChunkPart(self, indices, np.arange(len(indices)))], seed)

    def assemble(self, parts: Sequence[ChunkPart], seed: Seed) -> Mapping[str, StreamData]:
        """See `torchmn.readers.deserializer.AssemblingChunk`."""
        return _parse(parts, self.of)

    def leave_out(self, index: int, error: Array) -> None:
        """Count a wrong sequence. Raises DataError: one too many."""
        offset = self.place.offset + int(self.begins[index])
        self.of._wrong.add(offset, functools.partial(self._message, *error.tolist()))

    def _message(self, kind: int, at: int, number: int) -> str:
        before = self.text[:at].tobytes()
        line = self.place.line + before.count(b"\n")
        column = at - (before.rfind(b"\n") + 1) + 1
        what = describe(kind, self.text[at : at + 64].tobytes(), number, self.of._columns.fields)
        return f"{self.of._path}, line {line}, column {column}: {what}."


# ---- what to read


@dataclass(frozen=True)
class _Columns:
    """The streams as the parsers need them."""

    infos: tuple[StreamInformation, ...]
    fields: tuple[str, ...]
    names: Array
    bounds: Array
    is_sparse: Array
    num_sparse: int
    dims: Array
    max_lengths: tuple[int, ...]
    defining: int | None

    def samples_of(self, counts: Array) -> Array:
        """The samples of each sequence, as the minibatch size counts them; at least one."""
        one = slice(None) if self.defining is None else slice(self.defining, self.defining + 1)
        samples: Array = counts[:, one].max(axis=1, initial=1)
        return samples


def _columns_of(streams: Mapping[str, StreamDef]) -> _Columns:
    if not streams:
        raise UsageError("CTFDeserializer without streams: pass StreamDefs(name=StreamDef(...)).")
    infos, fields = [], []
    for number, (name, stream) in enumerate(streams.items()):
        field = name if stream.field is None else stream.field
        raw = field.encode()
        if not raw or raw.startswith(b"#") or any(byte in b" \t\r\n|" for byte in raw):
            raise UsageError(
                f"The field {field!r} of the stream {name!r} cannot be an input of a CTF file: it "
                "must have no blanks, no '|' and no '#' at its beginning."
            )
        if field in fields:
            raise UsageError(f"Two streams read the input {field!r}. Read it once.")
        for option in ("transforms", "context", "scp", "mlf", "broadcast"):
            if getattr(stream, option):
                raise UsageError(
                    f"The stream {name!r} of a CTF file has {option}, which text has not."
                )
        shape = stream.sample_shape
        if not shape:
            raise UsageError(
                f"The stream {name!r} has no shape. StreamDef(shape=...) says how many values a "
                "sample has."
            )
        if math.prod(shape) > _MAX_DIMENSION:
            raise UsageError(
                f"The stream {name!r} has {math.prod(shape)} values in a sample, more than "
                f"{_MAX_DIMENSION}."
            )
        infos.append(
            StreamInformation(
                name,
                number,
                "sparse" if stream.is_sparse else "dense",
                np.float32,
                shape,
                stream.defines_mb_size,
            )
        )
        fields.append(field)
    defining = [number for number, info in enumerate(infos) if info.defines_mb_size]
    if len(defining) > 1:
        raise UsageError(
            "More than one stream has defines_mb_size: "
            f"{', '.join(repr(infos[number].name) for number in defining)}. Choose one."
        )
    raw_names = [field.encode() for field in fields]
    return _Columns(
        tuple(infos),
        tuple(fields),
        np.frombuffer(b"".join(raw_names), np.uint8),
        np.cumsum([0, *map(len, raw_names)], dtype=np.int64),
        np.array([info.is_sparse for info in infos]),
        sum(info.is_sparse for info in infos),
        np.array([math.prod(info.shape) for info in infos], np.int64),
        tuple(stream.max_sequence_length for stream in streams.values()),
        defining[0] if defining else None,
    )


# ---- the index


Version = tuple[int, ...]


@dataclass(frozen=True)
class _Sequences:
    """Where the sequences of a chunk begin in its text, and the last one ends; their samples.

    ``counts`` are the samples by stream; None where each sequence has one of each.
    """

    begins: Array
    counts: Array | None

    @property
    def nbytes(self) -> int:
        return self.begins.nbytes + (0 if self.counts is None else self.counts.nbytes)


@dataclass(frozen=True)
class _ChunkPlace:
    """Where a chunk is in the file, and its first line, from 1.

    ``sequences`` is None where the index would become too large.
    """

    offset: int
    nbytes: int
    line: int
    info: ChunkInfo
    sequences: _Sequences | None


@dataclass(frozen=True)
class _Index:
    """``version`` of the file is None if it may change without being noticed."""

    chunks: tuple[_ChunkPlace, ...]
    with_ids: bool
    version: Version | None


def _version(file: BinaryIO) -> Version | None:
    """What differs after the file was changed; None if it was changed just now.

    Two changes within a tick of the file system's clock have the same time.
    """
    status = os.fstat(file.fileno())
    if abs(time.time() - status.st_mtime) < _MIN_AGE_S:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class _Table:
    """The sequences of a text: where they begin, and the last one ends; lines from 0, ids, samples.

    ``counts`` has the samples by stream.
    """

    begins: Array
    lines: Array
    ids: Array
    counts: Array
    num_lines: int

    @property
    def num_sequences(self) -> int:
        return len(self.lines)

    def first(self, num: int) -> _Sequences:
        """The first sequences, without what only the index needs."""
        counts = self.counts[:num]
        has_one = bool((counts == 1).all())
        return _Sequences(self.begins[: num + 1].copy(), None if has_one else counts.copy())


def _scan(text: Array, columns: _Columns, with_ids: bool) -> _Table:
    room = max(len(text) // 64, 1024)
    while True:
        begins, lines = np.empty((2, room), np.int64)
        ids = np.empty(room, np.uint64)
        counts = np.empty((room, len(columns.dims)), np.int64)
        num, num_lines = _kernels().scan(
            text, columns.names, columns.bounds, with_ids, begins, lines, ids, counts
        )
        if num >= 0:
            break
        room *= 4
    begins = np.append(begins[:num], len(text))
    lines, ids, counts = lines[:num].copy(), ids[:num].copy(), counts[:num].copy()
    return _Table(begins, lines, ids, counts, num_lines)


# ---- parsing


def _parse(parts: Sequence[ChunkPart], of: CTFDeserializer) -> dict[str, StreamData]:
    """Parse sequences of several chunks to their places."""
    columns, kernels = of._columns, _kernels()
    num, num_streams = sum(len(part.indices) for part in parts), len(columns.infos)
    lengths = _lengths(parts, num, num_streams)
    if lengths is None:
        first_rows = np.repeat(np.arange(num), num_streams).reshape(num, num_streams)
        num_rows = [num] * num_streams
    else:
        first_rows = lengths.cumsum(axis=0)
        num_rows = first_rows[-1].tolist()
        first_rows -= lengths
    starts, dense_size, num_sparse_rows, most_pairs = [], 0, 0, 0
    for info, rows in zip(columns.infos, num_rows, strict=True):
        starts.append(num_sparse_rows if info.is_sparse else dense_size)
        if info.is_sparse:
            num_sparse_rows += rows
        else:
            dense_size += rows * math.prod(info.shape)
    if num_sparse_rows:
        nbytes = sum(int((c.begins[i + 1] - c.begins[i]).sum()) for c, i, _ in parts)
        most_pairs = nbytes // _MIN_PAIR_BYTES + num
    dense = np.empty(dense_size, np.float32)
    pair_values = np.empty(columns.num_sparse * most_pairs, np.float32)
    pair_columns = np.empty(columns.num_sparse * most_pairs, np.int64)
    num_pairs = (np.cumsum(columns.is_sparse) - columns.is_sparse) * most_pairs
    row_pairs = np.empty((num_sparse_rows, 2), np.int64)
    errors = np.zeros((num, 3), np.int64)
    starts_array = np.array(starts)
    num_wrong = 0
    for chunk, indices, places in parts:
        num_wrong += kernels.parse(
            chunk.text,
            chunk.begins,
            indices,
            places,
            chunk.with_ids,
            of._skip_ids,
            columns.names,
            columns.bounds,
            columns.is_sparse,
            columns.dims,
            of._fill,
            first_rows,
            starts_array,
            dense,
            pair_values,
            pair_columns,
            num_pairs,
            row_pairs,
            errors,
        )
    right = None
    if num_wrong:
        right = errors[:, 0] == 0
        for chunk, indices, places in parts:
            for k in np.flatnonzero(~right[places]).tolist():
                chunk.leave_out(int(indices[k]), errors[places[k]])
        if lengths is None:
            lengths = np.ones((num, num_streams), np.int64)
    found: dict[str, StreamData] = {}
    for stream, info in enumerate(columns.infos):
        begin, rows = starts[stream], num_rows[stream]
        own = None if lengths is None else lengths[:, stream].copy()
        keep = None
        if own is not None:
            if right is not None:
                keep = np.repeat(right, own)
                own[~right] = 0
            has_one = all(c.has_one is None or c.has_one[stream] for c, _, _ in parts)
            own = None if has_one and (own == 1).all() else own
        data: torch.Tensor
        if info.is_sparse:
            pairs = row_pairs[begin : begin + rows]
            pairs = pairs if keep is None else pairs[keep]
            crow, entries, values = map(
                torch.from_numpy, kernels.csr(pair_values, pair_columns, pairs)
            )
            data = csr_tensor(crow, entries, values, (len(pairs), int(columns.dims[stream])))
        else:
            flat = dense[begin : begin + rows * math.prod(info.shape)]
            if 2 * len(flat) < len(dense):  # or who keeps these would keep all
                flat = flat.copy()
            data = torch.from_numpy(flat).view(rows, *info.shape)
            data = data if keep is None else data[torch.from_numpy(keep)]
        found[info.name] = data, None if own is None else torch.from_numpy(own)
    return found


def _lengths(parts: Sequence[ChunkPart], num: int, num_streams: int) -> Array | None:
    """The samples of each sequence by stream; None where each has one of each."""
    if all(part.chunk.counts is None for part in parts):
        return None
    lengths = np.ones((num, num_streams), np.int64)
    for chunk, indices, places in parts:
        if chunk.counts is not None:
            lengths[places] = chunk.counts[indices]
    return lengths


class _WrongSequences:
    """Counts wrong sequences, each once, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._offsets: set[int] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return _WrongSequences, (self._limit,)

    def add(self, offset: int, message: Callable[[], str]) -> None:
        """Warn of a sequence that is left out. Raises DataError: one too many."""
        with self._lock:
            if offset in self._offsets:
                return
            if len(self._offsets) == self._limit:
                allowed = (
                    " CTFDeserializer(..., max_errors=...) leaves wrong sequences out."
                    if self._limit == 0
                    else f" max_errors={self._limit} other sequences were wrong before."
                )
                raise DataError(message() + allowed)
            self._offsets.add(offset)
            num_left_out = len(self._offsets)
        warnings.warn(
            f"{message()} The sequence is left out ({num_left_out} of at most {self._limit}).",
            RuntimeWarning,
            stacklevel=3,
        )


# ---- the file


def _end_of_lines(text: Array) -> int:
    """Where the last whole line ends; 0 if there is none."""
    end, window = len(text), 64 * KiB
    while end > 0:
        begin = max(end - window, 0)
        found = text[begin:end].tobytes().rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end, window = begin, window * 4
    return 0


def _pages(nbytes: int) -> Array:
    """Memory that goes back to the system when it is dropped, as that of malloc may not."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8)


def _read(file: BinaryIO, path: str, offset: int, into: Array) -> Array:
    """The bytes from an offset; fewer than there is room for at the end of the file."""
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


@functools.cache
def _kernels() -> ModuleType:
    """The compiled parser if there is a compiler; warns once if there is none."""
    if importlib.util.find_spec("numba") is not None:
        return importlib.import_module("torchmn.readers.ctf_compiled")
    warnings.warn(
        "CTF text is parsed by Python, 30 to 100 times slower than by compiled code. "
        "Install numba: pip install 'torchmn[compression]'.",
        stacklevel=2,
    )
    return importlib.import_module("torchmn.readers.ctf_plain")
