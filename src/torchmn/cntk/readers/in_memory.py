"""Sources of data that is in memory: arrays, tables of pandas, small CSV files."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

import numpy as np

from torchmn.cntk.readers.arrays import ArrayChunk
from torchmn.cntk.readers.minibatch_plan import INFINITELY_REPEAT
from torchmn.cntk.readers.minibatch_source import MinibatchSource
from torchmn.errors import DataError, UnknownNameError, UsageError

Columns: TypeAlias = "str | Sequence[str]"
"""One column, whose samples have the shape ``()``, or several, ``(num_columns,)``."""


class MinibatchSourceFromData(MinibatchSource):
    """Minibatches of data in memory, in order unless ``randomize`` is True. Local.

    Args:
        data_streams: by stream name a NumPy array or tensor ``(num_sequences, *shape)`` of
            sequences of one sample, a list of arrays ``(length, *shape)``, one for each sequence,
            or a sparse matrix (SciPy's or ``torch.sparse_csr``) of one row for each sequence. A
            tuple ``(value, type)``, as in CNTK, is its value. float64 becomes float32; integers
            stay integers, as labels for PyTorch's losses.
        max_samples: see `MinibatchSource`.
        max_sweeps: see `MinibatchSource`.
        randomize: draw a new order for each sweep.
        randomization_seed: 0 or more; the same on all ranks.

    Raises UsageError: streams have different numbers of sequences, or a value is of no such type.

    >>> source = MinibatchSourceFromData({"x": torch.rand(100, 3), "y": torch.zeros(100, 1)})
    >>> source.next_minibatch(10, {"x": "x"})["x"].data.shape
    torch.Size([10, 3])
    """

    def __init__(
        self,
        data_streams: Mapping[str, Any],
        max_samples: int = INFINITELY_REPEAT,
        max_sweeps: int = INFINITELY_REPEAT,
        *,
        randomize: bool = False,
        randomization_seed: int = 0,
    ) -> None:
        super().__init__(
            ArrayChunk(data_streams),
            max_samples,
            max_sweeps,
            randomize=randomize,
            randomization_seed=randomization_seed,
        )


def from_pandas(
    frame: Any,
    streams: Mapping[str, Columns],
    *,
    dtypes: Mapping[str, Any] | None = None,
    max_samples: int = INFINITELY_REPEAT,
    max_sweeps: int = INFINITELY_REPEAT,
    randomize: bool = True,
    randomization_seed: int = 0,
) -> MinibatchSourceFromData:
    """A source of the rows of a pandas DataFrame, which is copied. Local.

    Args:
        frame: the DataFrame.
        streams: for each stream its column, or a list of columns.
        dtypes: of streams that are not float32, such as ``{"labels": "int64"}``.
        max_samples: see `MinibatchSource`.
        max_sweeps: see `MinibatchSource`.
        randomize: draw a new order for each sweep.
        randomization_seed: 0 or more; the same on all ranks.

    Raises:
        UsageError: there is no such column.
        DataError: a value is missing, no number, or not one of the stream's type.

    >>> import pandas
    >>> from torchmn.cntk.readers import from_pandas
    >>> frame = pandas.DataFrame({"age": [30, 40], "income": [1.5, 2.0], "bought": [0, 1]})
    >>> streams = {"features": ["age", "income"], "labels": "bought"}
    >>> source = from_pandas(frame, streams, randomize=False, max_sweeps=1)
    >>> source.next_minibatch(2)[source.streams.features].asarray().tolist()
    [[30.0, 1.5], [40.0, 2.0]]
    """
    columns = {}
    for name in _columns_of(streams, list(frame.columns), "the DataFrame"):
        try:
            values = np.asarray(frame[name], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"Column {name!r} of the DataFrame has the type {frame[name].dtype}: {error}. A "
                "stream needs numbers: encode categories first, for example with pandas.factorize."
            ) from error
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise DataError(
                f"Column {name!r} of the DataFrame has {values[wrong[0]]} in row {wrong[0]}, and "
                f"{len(wrong):,} such values in all. Drop these rows or fill them in."
            )
        columns[name] = values
    return MinibatchSourceFromData(
        _arrays(streams, columns, dtypes or {}),
        max_samples,
        max_sweeps,
        randomize=randomize,
        randomization_seed=randomization_seed,
    )


def from_csv(
    filename: str | PathLike[str],
    streams: Mapping[str, Columns],
    *,
    delimiter: str = ",",
    dtypes: Mapping[str, Any] | None = None,
    max_samples: int = INFINITELY_REPEAT,
    max_sweeps: int = INFINITELY_REPEAT,
    randomize: bool = True,
    randomization_seed: int = 0,
) -> MinibatchSourceFromData:
    """A source of the rows of a CSV file whose first line names the columns. Local.

    The file is read whole, without pandas. For data that does not fit into the memory, write it as
    text for `CTFDeserializer`.

    Args:
        filename: in UTF-8.
        streams: for each stream its column, or a list of columns. Others are not read.
        delimiter: between the values.
        dtypes: of streams that are not float32, such as ``{"labels": "int64"}``.
        max_samples: see `MinibatchSource`.
        max_sweeps: see `MinibatchSource`.
        randomize: draw a new order for each sweep.
        randomization_seed: 0 or more; the same on all ranks.

    Raises:
        UsageError: there is no such column.
        DataError: the file is missing; a value is no finite number (names line and column), or not
            one of the stream's type.

    ``from_csv("train.csv", {"features": ["age", "income"], "labels": "bought"})``

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = pathlib.Path(folder.name, "train.csv")
        >>> _ = file.write_text("age,income,bought\\n30,1.5,0\\n40,2.5,1\\n")
        >>> streams = {"features": ["age", "income"], "labels": "bought"}
        >>> source = from_csv(file, streams, randomize=False)
        >>> source.next_minibatch(2, {"x": source.streams.features})["x"].data.tolist()
        [[30.0, 1.5], [40.0, 2.5]]
        >>> folder.cleanup()
    """
    try:
        with open(filename, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(rows, [])]
            if not header:
                raise DataError(f"{filename} has no line. Its first line must name the columns.")
            names = _columns_of(streams, header, str(filename))
            columns = _numbers(rows, header, names, str(filename))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{filename} cannot be read: {error}.") from error
    return MinibatchSourceFromData(
        _arrays(streams, columns, dtypes or {}),
        max_samples,
        max_sweeps,
        randomize=randomize,
        randomization_seed=randomization_seed,
    )


def _numbers(
    rows: Any, header: list[str], names: Sequence[str], filename: str
) -> dict[str, np.ndarray[Any, Any]]:
    """The values of some columns."""
    places = [header.index(name) for name in names]
    columns = [array("d") for _ in names]
    for row in rows:
        if not row:  # an empty line
            continue
        where = f"{filename}, line {rows.line_num}"
        if len(row) != len(header):
            raise DataError(
                f"{where}: {len(row)} values where the first line names {len(header)} columns."
            )
        for name, place, column in zip(names, places, columns, strict=True):
            try:
                value = math.nan if "_" in row[place] else float(row[place])
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                raise DataError(
                    f"{where}, column {place + 1} ({name}): {row[place]!r} is no finite number."
                )
            column.append(value)
    return {name: np.array(column) for name, column in zip(names, columns, strict=True)}


def _columns_of(streams: Mapping[str, Columns], known: list[str], where: str) -> list[str]:
    """All columns of the streams."""
    names = [
        name
        for columns in streams.values()
        for name in ([columns] if isinstance(columns, str) else columns)
    ]
    for name in names:
        if name not in known:
            raise UnknownNameError(f"column of {where}", name, known)
    doubled = [name for name in known if name in names and known.count(name) > 1]
    if doubled:
        raise UsageError(f"{where} has several columns with the name {doubled[0]!r}. Rename them.")
    return list(dict.fromkeys(names))


def _arrays(
    streams: Mapping[str, Columns],
    columns: Mapping[str, np.ndarray[Any, Any]],
    dtypes: Mapping[str, Any],
) -> dict[str, np.ndarray[Any, Any]]:
    for name in dtypes:
        if name not in streams:
            raise UnknownNameError("stream in dtypes", name, streams)
    arrays = {}
    for name, wanted in streams.items():
        one = isinstance(wanted, str)
        value = columns[wanted] if one else np.stack([columns[n] for n in wanted], axis=1)  # type: ignore[index]
        arrays[name] = _cast(name, value, np.dtype(dtypes.get(name, np.float32)))
    return arrays


def _cast(name: str, values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The values in the type of a stream. Raises DataError: it cannot hold one of them."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: np.ndarray[Any, Any] = values.astype(dtype)
    is_lost = ~np.isfinite(found)
    if dtype.kind != "f":  # from 2**53 on, float64 does not hold every integer
        is_lost = (found != values) | (np.abs(values) >= 2**53)
    if is_lost.any():
        raise DataError(
            f"The stream {name!r} has the value {values[is_lost][0]}, which {dtype} cannot hold. "
            "Give the stream another type: dtypes={...}."
        )
    return found
