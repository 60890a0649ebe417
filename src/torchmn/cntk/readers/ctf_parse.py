"""Parsing of CTF text: where its sequences are, and their samples for a minibatch."""

import functools
import importlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from torchmn.base.errors import UsageError, require
from torchmn.cntk.readers.deserializer import (
    ChunkPart,
    StreamData,
    StreamDef,
    StreamInformation,
    csr_tensor,
)

Array = np.ndarray[Any, Any]

_MAX_DIMENSION = 2**31 - 1


class Inputs(NamedTuple):
    """The inputs that streams read, as the parsers need them.

    The name of input s is ``names[bounds[s]:bounds[s + 1]]``; ``dims[s]`` are the values of a
    sample.
    """

    names: Array
    bounds: Array
    is_sparse: Array
    dims: Array


@dataclass(frozen=True)
class Columns:
    """The streams of a file. ``fields`` are their names in the file.

    ``defining`` is the number of the stream that defines the minibatch size, or None.
    """

    infos: tuple[StreamInformation, ...]
    fields: tuple[str, ...]
    inputs: Inputs
    max_lengths: tuple[int, ...]
    defining: int | None

    def samples_of(self, counts: Array) -> Array:
        """The samples of each sequence, as the minibatch size counts them; at least one."""
        one = slice(None) if self.defining is None else slice(self.defining, self.defining + 1)
        samples: Array = counts[:, one].max(axis=1, initial=1)
        return samples


def columns_of(streams: Mapping[str, StreamDef]) -> Columns:
    """Check the streams. Raises UsageError: one has no shape, or an unsupported option."""
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
                    f"The stream {name!r} of a CTF file has {option}, which text does not have."
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
    inputs = Inputs(
        np.frombuffer(b"".join(raw_names), np.uint8),
        np.cumsum([0, *map(len, raw_names)], dtype=np.int64),
        np.array([info.is_sparse for info in infos]),
        np.array([math.prod(info.shape) for info in infos], np.int64),
    )
    return Columns(
        tuple(infos),
        tuple(fields),
        inputs,
        tuple(stream.max_sequence_length for stream in streams.values()),
        defining[0] if defining else None,
    )


NOT_A_SAMPLE = 1
NO_NAME = 2
NOT_A_NUMBER = 3
NOT_A_PAIR = 4
INDEX_TOO_LARGE = 5
DUPLICATE_INDEX = 6
OUT_OF_RANGE = 7
TOO_FEW = 8
TOO_MANY = 9
STREAM_MISSING = 10
UNEXPECTED_ID = 11

TOO_LARGE_FOR_FLOAT32 = (2 - 2.0**-24) * 2.0**127  # rounds to infinity from here

_MAX_QUOTED = 40


def describe(kind: int, text: bytes, number: int, fields: Sequence[str]) -> str:
    """Describe an error. ``text`` begins with the token; ``number`` is what the parser adds."""
    token = quoted(text)
    return {
        NOT_A_SAMPLE: f"expected '|' and the name of an input, found {token}",
        NO_NAME: "a '|' without the name of an input",
        NOT_A_NUMBER: f"{token} is not a number",
        NOT_A_PAIR: f"{token} is not index:value, as a sparse stream has it",
        INDEX_TOO_LARGE: f"the index of {token} is not below the stream's dimension, {number}",
        DUPLICATE_INDEX: f"the index {number} occurs twice in the sample",
        OUT_OF_RANGE: f"{token} is too large for float32",
        TOO_FEW: f"the sample has {number} values, fewer than the stream's shape; where the rest "
        "is meant to be zero, CTFDeserializer(..., fill_with_zeros=True) fills it up",
        TOO_MANY: f"the sample has more than {number} values, from {token} on",
        STREAM_MISSING: f"the sequence has no sample of the input {_field(fields, number)!r}",
        UNEXPECTED_ID: f"the line begins with the sequence id {token}, but the first line of the "
        "file has none; CTFDeserializer(..., skip_sequence_ids=True) ignores ids",
    }[kind]


def quoted(text: bytes) -> str:
    """The token that the text begins with, in quotes, cut if it is long."""
    end = next((i for i, byte in enumerate(text[: _MAX_QUOTED + 1]) if byte in b" \t\r\n|"), None)
    if end is None:
        cut = text[:_MAX_QUOTED]
        return ascii(cut.decode("utf-8", "replace")) + ("..." if len(text) > _MAX_QUOTED else "")
    return ascii(text[: max(end, 1)].decode("utf-8", "replace"))


def _field(fields: Sequence[str], number: int) -> str:
    return fields[number] if 0 <= number < len(fields) else ""


_MIN_PAIR_BYTES = 4  # "1:1" and a blank


@functools.cache
def kernels() -> ModuleType:
    """The parser. Raises UnsupportedError: numba, which compiles it, is not installed."""
    require("numba", "Reading CTF text", "torchmn[compression]")
    return importlib.import_module("torchmn.cntk.readers.ctf_compiled")


# ---- sequences


@dataclass(frozen=True)
class Sequences:
    """The sequences of a chunk: ``begins`` are their offsets in its text and the end of the last.

    ``counts`` are their numbers of samples by stream; None if each sequence has one of each.
    """

    begins: Array
    counts: Array | None

    @property
    def nbytes(self) -> int:
        """The size of both arrays in memory."""
        return self.begins.nbytes + (0 if self.counts is None else self.counts.nbytes)


@dataclass(frozen=True)
class Table:
    """The sequences of a text: ``begins`` are their offsets and the end of the last one.

    ``lines`` count from 0; ``counts`` are numbers of samples by stream.
    """

    begins: Array
    lines: Array
    ids: Array
    counts: Array
    num_lines: int

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return len(self.lines)

    def first(self, num: int) -> Sequences:
        """The first sequences, without the lines and ids, which only the index needs."""
        counts = self.counts[:num]
        has_one = bool((counts == 1).all())
        return Sequences(self.begins[: num + 1].copy(), None if has_one else counts.copy())


def scan(text: Array, columns: Columns, with_ids: bool) -> Table:
    """Find the sequences of whole lines."""
    room = max(len(text) // 64, 1024)
    while True:
        begins, lines = np.empty((2, room), np.int64)
        ids = np.empty(room, np.uint64)
        counts = np.empty((room, len(columns.inputs.dims)), np.int64)
        num, num_lines = kernels().scan(text, columns.inputs, with_ids, begins, lines, ids, counts)
        if num >= 0:  # negative: the arrays were too small
            break
        room *= 4
    begins = np.append(begins[:num], len(text))
    lines, ids, counts = lines[:num].copy(), ids[:num].copy(), counts[:num].copy()
    return Table(begins, lines, ids, counts, num_lines)


# Blank lines and those of comments, and the blanks after them.
_WITHOUT_SAMPLES = re.compile(rb"(?:[ \t\r]*(?:\|#[^|\n]*)*\n)*[ \t\r]*")


def has_ids(text: Array) -> bool | None:
    """Whether the first line with a sample begins with a number; None if there is no such line."""
    begin = cast("re.Match[bytes]", _WITHOUT_SAMPLES.match(text.data)).end()
    return None if begin == len(text) else text[begin : begin + 1].tobytes().isdigit()


# ---- samples


class Samples(NamedTuple):
    """Memory for the samples of a minibatch, which a parser fills.

    In stream s sequence i has the rows ``first_rows[i, s]`` and the following. Those of a dense
    stream are in ``dense[starts[s]:]``. Of a sparse one, ``row_pairs[starts[s]:]`` holds where each
    row begins and ends in ``pair_values`` and ``pair_columns``, and ``num_pairs[s]`` is where the
    next pair goes. ``error`` is the first error: kind, offset, number.
    """

    first_rows: Array
    starts: Array
    dense: Array
    pair_values: Array
    pair_columns: Array
    num_pairs: Array
    row_pairs: Array
    error: Array


def parse(
    parts: Sequence[ChunkPart], columns: Columns, may_have_ids: bool, fill: bool
) -> dict[str, StreamData]:
    """Parse sequences of several `torchmn.cntk.readers.ctf.CTFChunk` to their places.

    Args:
        parts: the sequences and their places.
        columns: the streams.
        may_have_ids: whether lines may begin with numbers.
        fill: a dense sample may end early; the rest is zero.
    """
    num = sum(len(part.indices) for part in parts)
    lengths = _lengths(parts, num, len(columns.infos))
    first_rows, num_rows = _rows(lengths, num, len(columns.infos))
    samples = _memory_for(parts, columns, first_rows, num_rows)
    for chunk, indices, places in parts:
        if kernels().parse(
            chunk.text, chunk.begins, indices, places, may_have_ids, columns.inputs, fill, samples
        ):
            raise chunk.error(*samples.error.tolist())
    found: dict[str, StreamData] = {}
    for stream, info in enumerate(columns.infos):
        own = None if lengths is None else lengths[:, stream].copy()
        if own is not None:
            has_one = all(c.has_one is None or c.has_one[stream] for c, _, _ in parts)
            own = None if has_one and (own == 1).all() else own
        data = _tensor(samples, columns, stream, num_rows[stream])
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


def _rows(lengths: Array | None, num: int, num_streams: int) -> tuple[Array, list[int]]:
    """The first row of each sequence and the number of rows, both by stream."""
    if lengths is None:
        first_rows = np.repeat(np.arange(num), num_streams).reshape(num, num_streams)
        return first_rows, [num] * num_streams
    ends = lengths.cumsum(axis=0)
    return ends - lengths, ends[-1].tolist()


def _memory_for(
    parts: Sequence[ChunkPart], columns: Columns, first_rows: Array, num_rows: list[int]
) -> Samples:
    is_sparse = columns.inputs.is_sparse
    starts, dense_size, num_sparse_rows, max_pairs = [], 0, 0, 0
    for info, rows in zip(columns.infos, num_rows, strict=True):
        starts.append(num_sparse_rows if info.is_sparse else dense_size)
        if info.is_sparse:
            num_sparse_rows += rows
        else:
            dense_size += rows * math.prod(info.shape)
    if num_sparse_rows:
        nbytes = sum(int((c.begins[i + 1] - c.begins[i]).sum()) for c, i, _ in parts)
        max_pairs = nbytes // _MIN_PAIR_BYTES + len(first_rows)
    num_sparse = sum(info.is_sparse for info in columns.infos)
    return Samples(
        first_rows,
        np.array(starts),
        np.empty(dense_size, np.float32),
        np.empty(num_sparse * max_pairs, np.float32),
        np.empty(num_sparse * max_pairs, np.int64),
        (np.cumsum(is_sparse) - is_sparse) * max_pairs,
        np.empty((num_sparse_rows, 2), np.int64),
        np.zeros(3, np.int64),
    )


def _tensor(samples: Samples, columns: Columns, stream: int, num_rows: int) -> torch.Tensor:
    info, begin = columns.infos[stream], int(samples.starts[stream])
    if info.is_sparse:
        pairs = samples.row_pairs[begin : begin + num_rows]
        crow, entries, values = map(
            torch.from_numpy, kernels().csr(samples.pair_values, samples.pair_columns, pairs)
        )
        return csr_tensor(crow, entries, values, (len(pairs), math.prod(info.shape)))
    flat = samples.dense[begin : begin + num_rows * math.prod(info.shape)]
    if 2 * len(flat) < len(samples.dense):  # or who keeps these would keep all
        flat = flat.copy()
    return torch.from_numpy(flat).view(num_rows, *info.shape)
