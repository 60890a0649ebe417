"""Read the record of a run into arrays, after its end or while it continues.

A run of any length is read in bounded time and memory. Where its lines are more than
`MAX_NBYTES`, windows of consecutive steps are read, the same steps on every rank, spread over the
whole run. They are found by seeking, since steps are in order in a file.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from torchmn.base.errors import DataError
from torchmn.cluster.units import grouped
from torchmn.control.codec import decode_union
from torchmn.observe.read.recorded_run import Buckets, Floats, RankRecord, Run, Steps
from torchmn.observe.read.seeking import MEMORY, STEP, seek, step_range, tail
from torchmn.record.records import (
    FOLDER,
    FORMAT,
    PHASES,
    GradientTimes,
    Line,
    Memory,
    RunEnd,
    RunStart,
    SettingsChanged,
    Step,
    Value,
)

MAX_NBYTES = 128 * 2**20  # of lines that are read of a run, over all its ranks
WINDOW_STEPS = 8
# Lines of `GradientTimes` that are kept of a rank: they are long, and similar.
MAX_GRADIENT_TIMES = 8

_FILE = re.compile(r"rank(\d+)(?:\.(\d+))?\.jsonl")
_ROUND = re.compile(r"round(\d+)")

_MAX_TAIL_BYTES = 1 << 22  # which hold those of the 10 s between two measurements of memory
# Lines that are read there although they belong to no step that is.
_AT_THE_END = (b'"RunEnd"', b'"Memory"')
_decoder = msgspec.json.Decoder(Line)
_STEP_COLUMNS = ("step", "at_s", "seconds", "samples", "run_queue_s", "cpu_s", "others_cpu_s")
_BUCKET_COLUMNS = ("nbytes", "sent_nbytes", "started_s", "ended_s", "encode_s", "decode_s")
_of_step, _of_bucket = attrgetter(*_STEP_COLUMNS), attrgetter(*_BUCKET_COLUMNS)


def find_records(path: Path) -> Path:
    """Find the folder of a run's records: ``path``, its ``steps``, or those of its latest run.

    For an elastic run these are the records of the last round. Raises DataError: there are none.
    """
    latest = path / "latest"
    places = (path / FOLDER, path, *_rounds(path), latest / FOLDER, *_rounds(latest))
    for folder in places:
        if folder.is_dir() and any(_FILE.fullmatch(file.name) for file in folder.iterdir()):
            return folder
    what = "is no folder" if path.exists() else "does not exist"
    raise DataError(
        f"No records of a run in {str(path)!r}: "
        + (f"it has no {FOLDER}/rank*.jsonl" if path.is_dir() else f"it {what}")
        + ". Name the log folder of a run, which torchmn run prints when it starts, or the folder "
        "that was given to the recorder."
    )


def _rounds(path: Path) -> list[Path]:
    """Return the folders of records of an elastic run's rounds, the last round first."""
    numbers = [
        int(match[1]) for each in path.glob("round*") if (match := _ROUND.fullmatch(each.name))
    ]
    return [path / f"round{number}" / FOLDER for number in sorted(numbers, reverse=True)]


def read_run(path: Path, *, max_nbytes: int = MAX_NBYTES, last_steps: int | None = None) -> Run:
    """Read the records of a run: all, or a sample of about ``max_nbytes``. Local.

    A line that was cut because the run continues or was killed is left out. Raises DataError: there
    are no records, none of them can be read, or a newer version of torchmn wrote them.

    Args:
        path: the log folder of the run, its folder of records, or a folder with a link ``latest``.
        max_nbytes: maximum size of the lines that are read, in bytes.
        last_steps: read only this number of steps, at the end.
    """
    try:
        return _read_run(find_records(path), max_nbytes, last_steps)
    except OSError as error:
        raise DataError(
            f"The records in {str(path)!r} cannot be read: {error.strerror or error}."
        ) from None


def _read_run(folder: Path, max_nbytes: int, last_steps: int | None) -> Run:
    files = _rank_files(folder)
    readers, unreadable = [], {}
    for rank, paths in sorted(files.items()):
        try:
            readers.append(_RankReader(paths))
        except DataError as error:
            unreadable[rank] = str(error)
    if not readers:
        raise DataError(
            f"No rank's record in {str(folder)!r} can be read: {unreadable[min(files)]}"
        )
    windows: list[tuple[int, int]] | None = None
    if last_steps is not None:
        last = min(reader.last_step for reader in readers)  # some ranks may be a step ahead
        windows = [(last + 1 - last_steps, last + 1)]
    elif sum(reader.nbytes for reader in readers) > max_nbytes:
        windows = _windows(readers, max_nbytes / len(readers))
    return Run(
        folder=folder,
        ranks=tuple(reader.read(windows) for reader in readers),
        unreadable=unreadable,
        modified_s=max(reader.modified_s for reader in readers),
    )


def _rank_files(folder: Path) -> dict[int, list[Path]]:
    """Return the files of each rank in the order of time."""
    found = grouped(
        (int(match[1]), (int(match[2] or 0), path))
        for path in folder.iterdir()
        if (match := _FILE.fullmatch(path.name))
    )
    return {rank: [path for _, path in sorted(paths)] for rank, paths in found.items()}


def _windows(readers: Sequence[_RankReader], nbytes_per_rank: float) -> list[tuple[int, int]]:
    """Return first step and end of each window to read, the same for all ranks.

    Their distances differ, since equal ones might coincide with a period such as checkpoints'.
    """
    first = min(reader.first_step for reader in readers)
    last = max(reader.last_step for reader in readers)
    step_nbytes = max(reader.nbytes / max(1, reader.num_steps) for reader in readers)
    count = max(2, int(nbytes_per_rank / (step_nbytes * WINDOW_STEPS)))
    spacing = (last + 1 - first) / count
    if spacing <= WINDOW_STEPS:
        return [(first, last + 1)]
    starts = []
    for number in range(count):
        shift = 0.0 if number == 0 else number * 0.618 % 1 * (spacing - WINDOW_STEPS)
        starts.append(int(first + number * spacing + shift))
    starts[-1] = last + 1 - WINDOW_STEPS
    return [(start, start + WINDOW_STEPS) for start in starts]


class _RankReader:
    """Reads the files of one rank. Raises DataError: the first line is not a `RunStart`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        with paths[0].open("rb") as file:
            self._start = _first_line(file, paths[0])
        self._paths: list[Path] = []
        self._ranges: list[tuple[int, int] | None] = []
        self.nbytes = 0
        self.modified_s = 0.0
        for path in paths:
            with suppress(FileNotFoundError):  # of a long run, the oldest is removed meanwhile
                self._ranges.append(step_range(path))
                self._paths.append(path)
                status = path.stat()
                self.nbytes += status.st_size
                self.modified_s = max(self.modified_s, status.st_mtime)
        known = [each for each in self._ranges if each is not None]
        self.num_steps = sum(last + 1 - first for first, last in known)
        self.first_step = min((first for first, _ in known), default=0)
        self.last_step = max((last for _, last in known), default=-1)

    def read(self, windows: Sequence[tuple[int, int]] | None) -> RankRecord:
        """Read all lines, or only those in windows, before the first step and at the end."""
        table = _Table(self._start)
        for index, path in enumerate(self._paths):
            with suppress(FileNotFoundError), path.open("rb") as file:
                if windows is None:
                    for text in file:
                        table.add(text)
                else:
                    self._read_windows(file, index, windows, table)
        return table.record(
            first_step=self.first_step, last_step=self.last_step, is_sampled=windows is not None
        )

    def _read_windows(
        self, file: BinaryIO, index: int, windows: Sequence[tuple[int, int]], table: _Table
    ) -> None:
        steps = self._ranges[index]
        if steps is None:
            return
        for first, end in windows:
            if end <= steps[0] or first > steps[1]:
                continue
            seek(file, first)
            for text in file:
                match = STEP.match(b"\n" + text[:200])
                if match and int(match[1]) >= end:
                    break
                if match is None or int(match[1]) >= first:
                    table.add(text)
        if index >= len(self._paths) - 2:  # a new file may have no line of these yet
            # Many windows have lines of memory among them.
            wanted = MEMORY if len(windows) == 1 else STEP
            last = tail(file, wanted, max_nbytes=_MAX_TAIL_BYTES)
            for text in last.splitlines(keepends=True):
                if any(kind in text[:40] for kind in _AT_THE_END):
                    table.add(text)


class _Table:
    """Collects the lines of a rank and makes columns of them."""

    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._num_starts = 0
        self._num_damaged = 0
        self._clear()

    def _clear(self) -> None:
        self._columns: list[tuple[float | None, ...]] = []
        self._phases: list[list[float]] = []
        self._buckets: list[tuple[float, ...]] = []
        self._sent: Counter[str] = Counter()
        self._others: dict[type[Line], list[Any]] = defaultdict(list)

    def add(self, text: bytes) -> None:
        num_times = len(self._others[GradientTimes])
        if num_times == MAX_GRADIENT_TIMES and b'"GradientTimes"' in text[:40]:
            return
        line = _decode(text)
        if line is None:
            self._num_damaged += text.endswith(b"\n")
        elif isinstance(line, Step):
            self._add_step(line)
        elif isinstance(line, RunStart):
            if self._num_starts and line == self._start:  # of a later file of the same process
                return
            self._num_starts += 1
            self._start = line
            self._clear()
        else:
            self._others[type(line)].append(line)

    def _add_step(self, line: Step) -> None:
        row = len(self._columns)
        self._columns.append(_of_step(line))
        phases = line.phases
        self._phases.append([phases.get(phase, 0.0) for phase in PHASES])
        for bucket in line.buckets:
            self._buckets.append((row, *_of_bucket(bucket)))
        self._sent.update(line.sent)

    def record(self, *, first_step: int, last_step: int, is_sampled: bool) -> RankRecord:
        steps = Steps(
            **_columns(self._columns, _STEP_COLUMNS),
            phases=np.array(self._phases, dtype=np.float32).reshape(-1, len(PHASES)),
            buckets=Buckets(**_columns(self._buckets, ("row", *_BUCKET_COLUMNS))),
        )
        others = self._others
        memory = {(each.at_s, each.rss_nbytes, each.device_nbytes) for each in others[Memory]}
        at_s, process, device = _transposed(sorted(memory), 3)
        values = grouped((each.name, each) for each in others[Value])
        settings = dict(self._start.settings)
        for changed in others[SettingsChanged]:
            settings |= changed.settings
        return RankRecord(
            start=self._start,
            settings=settings,
            steps=steps,
            sent=self._sent,
            values={
                name: (
                    np.array([each.step for each in found], dtype=np.int64),
                    np.array([each.value for each in found], dtype=np.float64),
                )
                for name, found in values.items()
            },
            memory=(at_s, process, device),
            gradient_times=others[GradientTimes],
            first_step=first_step,
            last_step=last_step,
            end=next(reversed(others[RunEnd]), None),
            num_damaged=self._num_damaged,
            is_sampled=is_sampled,
            num_starts=self._num_starts,
        )


def _columns(rows: Sequence[tuple[float | None, ...]], names: Sequence[str]) -> dict[str, Any]:
    """Return arrays by column name; steps and rows as integers, others as floats."""
    columns = zip(names, _transposed(rows, len(names)), strict=True)
    return {n: c.astype(np.int64) if n in ("step", "row") else c for n, c in columns}


def _transposed(rows: Sequence[tuple[float | None, ...]], width: int) -> Floats:
    """Return the columns of a table; None becomes NaN."""
    return np.array(rows, dtype=np.float64).reshape(-1, width).T.copy()


def _decode(text: bytes) -> Line | None:
    """Decode a line; None if it is cut off or not a line of a record."""
    try:
        line: Line = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        try:  # lone surrogates, as in host names that are no UTF-8
            line = decode_union(text, Line)
        except ValueError:
            return None
    return line


def _first_line(file: BinaryIO, path: Path) -> RunStart:
    text = file.readline()
    start = _decode(text)
    if isinstance(start, RunStart) and start.format == FORMAT:
        return start
    number = re.search(rb'"format":\s*(\d+)', text)
    if number and int(number[1]) > FORMAT:
        raise DataError(
            f"{path} has format {int(number[1])}, which a newer version of torchmn wrote; this one "
            f"reads format {FORMAT}: read it with the version that wrote it."
        )
    seen = "is empty" if not text else "does not begin with a valid line of type RunStart"
    raise DataError(f"{path} {seen}.")
