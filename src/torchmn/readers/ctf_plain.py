"""The functions of `ctf_compiled` in Python, for where numba is not installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from torchmn.readers.assembly import rows_of
from torchmn.readers.ctf_columns import Inputs
from torchmn.readers.ctf_errors import (
    DUPLICATE_INDEX,
    INDEX_TOO_LARGE,
    NO_NAME,
    NOT_A_NUMBER,
    NOT_A_PAIR,
    NOT_A_SAMPLE,
    OUT_OF_RANGE,
    STREAM_MISSING,
    TOO_FEW,
    TOO_LARGE_FOR_FLOAT32,
    TOO_MANY,
    UNEXPECTED_ID,
)
from torchmn.readers.ctf_parse import Samples

Array = np.ndarray[Any, Any]

_PART = re.compile(rb"\|#[^|]*|\|([^ \t\r|]*)([^|]*)|([^|]+)")  # comment, name and values, or other
_TOKEN = re.compile(rb"[^ \t\r]+")
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_IDS_MODULO = 2**64


class _WrongSampleError(Exception):
    """Holds kind, offset and number."""


def has_ids(text: Array) -> int:
    """See `ctf_compiled.has_ids`."""
    for line in text.tobytes().split(b"\n"):
        if line.lstrip(b" \t\r")[:1].isdigit():
            return 1
        if not _is_ignored(line):
            return 0
    return -1


def _is_ignored(rest: bytes) -> bool:
    """Whether a line without an id has no sample: it is blank, or has comments only."""
    parts = _PART.finditer(rest)
    return all(part[0].startswith(b"|#") or not part[0].strip(b" \t\r") for part in parts)


def scan(
    text: Array,
    inputs: Inputs,
    with_ids: bool,
    begins: Array,
    lines: Array,
    ids: Array,
    counts: Array,
) -> tuple[int, int]:
    """See `ctf_compiled.scan`."""
    streams = _streams(inputs)
    content = text.tobytes()
    n, line, start = 0, 0, 0
    last_id: int | None = None
    while start < len(content):
        found = content.find(b"\n", start)
        end = len(content) if found < 0 else found
        row = content[start:end]
        number, rest = _split_id(row)
        if number or not _is_ignored(rest):
            value = _as_id(number)
            if not with_ids or n == 0 or (number and value != last_id):
                if n == len(begins):
                    return -1, line
                begins[n], lines[n], ids[n] = start, line, value
                counts[n] = 0
                last_id = value
                n += 1
            for part in _PART.finditer(rest):
                if part[1] is not None:
                    stream = streams.get(part[1])
                    if stream is not None:
                        counts[n - 1, stream] += 1
        line += 1
        start = end + 1
    return n, line


def _split_id(row: bytes) -> tuple[bytes, bytes]:
    """The digits that the line begins with, and the rest."""
    row = row.lstrip(b" \t\r")
    rest = row.lstrip(b"0123456789")
    return row[: len(row) - len(rest)], rest


def _as_id(digits: bytes) -> int:
    """Ids of more than 64 bits differ in their last bits at least, as in `ctf_compiled`."""
    value = 0
    for begin in range(0, len(digits), 1000):  # int() refuses longer texts
        piece = digits[begin : begin + 1000]
        value = (value * pow(10, len(piece), _IDS_MODULO) + int(piece)) % _IDS_MODULO
    return value


def _streams(inputs: Inputs) -> dict[bytes, int]:
    flat, bounds = inputs.names.tobytes(), inputs.bounds
    return {flat[bounds[s] : bounds[s + 1]]: s for s in range(len(bounds) - 1)}


def parse(
    text: Array,
    begins: Array,
    indices: Array,
    places: Array,
    may_have_ids: bool,
    inputs: Inputs,
    fill: bool,
    samples: Samples,
) -> int:
    """See `ctf_compiled.parse`."""
    streams = _streams(inputs)
    _, _, is_sparse, dims = inputs
    first_rows, starts, dense, pair_values, pair_columns, num_pairs, row_pairs, errors = samples
    num_wrong = 0
    for index, i in zip(indices.tolist(), places.tolist(), strict=True):
        begin, end = begins[index : index + 2].tolist()
        first_row, rows = first_rows[i], np.zeros(len(dims), np.int64)
        try:
            for bar, offset, stream, sample in _samples(
                text[begin:end].tobytes(), streams, may_have_ids
            ):
                dim = int(dims[stream])
                place = first_row[stream] + rows[stream]
                if is_sparse[stream]:
                    columns, values = _pairs_of(sample, bar, offset, dim)
                    first = num_pairs[stream]
                    last = num_pairs[stream] = first + len(columns)
                    pair_columns[first:last] = columns
                    pair_values[first:last] = values
                    row_pairs[starts[stream] + place] = first, last
                else:
                    row = _values_of(sample, offset, dim)
                    if len(row) < dim and not fill:
                        raise _WrongSampleError(TOO_FEW, bar, len(row))
                    base = starts[stream] + place * dim
                    dense[base : base + len(row)] = row
                    dense[base + len(row) : base + dim] = 0
                rows[stream] += 1
            missing = np.flatnonzero(rows == 0)
            if missing.size:
                raise _WrongSampleError(STREAM_MISSING, 0, missing[0])
        except _WrongSampleError as error:
            kind, offset, number = error.args
            errors[i] = kind, begin + offset, number
            num_wrong += 1
    return num_wrong


def csr(pair_values: Array, pair_columns: Array, row_pairs: Array) -> tuple[Array, Array, Array]:
    """See `ctf_compiled.csr`."""
    begins, ends = row_pairs.T
    pairs = rows_of(begins, ends - begins)
    crow = np.append(0, np.cumsum(ends - begins))
    return crow, pair_columns[pairs], pair_values[pairs]


def _samples(
    content: bytes, streams: dict[bytes, int], may_have_ids: bool
) -> Iterator[tuple[int, int, int, bytes]]:
    """The samples of known streams: offset of the bar, of the values, stream and values."""
    start = 0
    for line in content.split(b"\n"):
        number, rest = _split_id(line)
        base = start + len(line) - len(rest)
        if number and not may_have_ids:
            raise _WrongSampleError(UNEXPECTED_ID, base - len(number), 0)
        for part in _PART.finditer(rest):
            name, values, other = part.groups()
            if other is not None and other.strip(b" \t\r"):
                blank = len(other) - len(other.lstrip(b" \t\r"))
                raise _WrongSampleError(NOT_A_SAMPLE, base + part.start() + blank, 0)
            if name == b"":
                raise _WrongSampleError(NO_NAME, base + part.start(), 0)
            if name in streams:
                yield base + part.start(), base + part.start(2), streams[name], values
        start += len(line) + 1


def _values_of(sample: bytes, offset: int, dim: int) -> list[float]:
    values: list[float] = []
    for token in _TOKEN.finditer(sample):
        at = offset + token.start()
        if _NUMBER.fullmatch(token[0]) is None:
            raise _WrongSampleError(NOT_A_NUMBER, at, 0)
        value = float(token[0])
        if abs(value) >= TOO_LARGE_FOR_FLOAT32:
            raise _WrongSampleError(OUT_OF_RANGE, at, 0)
        if len(values) == dim:
            raise _WrongSampleError(TOO_MANY, at, dim)
        values.append(value)
    return values


def _pairs_of(sample: bytes, bar: int, offset: int, dim: int) -> tuple[Array, Array]:
    """Columns in ascending order, and values."""
    columns: list[int] = []
    values: list[float] = []
    for token in _TOKEN.finditer(sample):
        at = offset + token.start()
        index, colon, number = token[0].partition(b":")
        if not (colon and index.isdigit()):
            raise _WrongSampleError(NOT_A_PAIR, at, 0)
        if len(index.lstrip(b"0")) > 12 or int(index) >= dim:
            raise _WrongSampleError(INDEX_TOO_LARGE, at, dim)
        if _NUMBER.fullmatch(number) is None:
            raise _WrongSampleError(NOT_A_PAIR, at, 0)
        value = float(number)
        if abs(value) >= TOO_LARGE_FOR_FLOAT32:
            raise _WrongSampleError(OUT_OF_RANGE, at, 0)
        columns.append(int(index))
        values.append(value)
    order = np.argsort(np.array(columns, np.int64), kind="stable")
    in_order = np.array(columns, np.int64)[order]
    twice = np.flatnonzero(in_order[1:] == in_order[:-1])
    if twice.size:
        raise _WrongSampleError(DUPLICATE_INDEX, bar, in_order[twice[0]])
    return in_order, np.array(values)[order]
