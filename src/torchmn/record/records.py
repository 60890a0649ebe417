"""The format of records: one file of JSON lines per rank, `rank{rank}.jsonl` in folder `steps`.

The first line is a `RunStart`; the others follow in the order of their time. A file may end in the
middle of a line, since the run may not have ended, or have been killed. Long runs are rotated:
`rank{rank}.1.jsonl` continues `rank{rank}.jsonl`, and so on.

Times ``at_s`` are seconds of the rank's own monotonic clock (`time.perf_counter`). A `ClockOffset`
tells how far it is from that of rank 0.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from torchmn.base.log import Log
from torchmn.base.private_files import make_private_folder, open_private
from torchmn.cluster.units import MiB
from torchmn.control import codec
from torchmn.control.codec import Record

FORMAT = 1

Phase = Literal[
    "data",
    "copy",
    "forward",
    "backward",
    "exchange",
    "encode",
    "decode",
    "optimizer",
    "evaluation",
    "checkpoint",
    "other",
]
"""The parts of a step, which do not overlap and add up to it.

``data`` waits for the next batch, ``copy`` moves it to the device, ``backward`` lasts from this
rank's first gradient to its last, ``exchange`` is what the training thread waits for the exchange,
without ``encode`` and ``decode`` where that thread does them, ``other`` is the rest.
"""
PHASES: tuple[Phase, ...] = get_args(Phase)

# A reader takes lines with other numbers for damaged ones: sums of these do not overflow.
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
Integer = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**24)]


class RunStart(Record, frozen=True, kw_only=True):
    """The first line of a rank. ``unix_s`` and ``at_s`` are the same moment on two clocks.

    ``settings`` holds what the training uses, as text: schedule, codec, route, bucket size, model
    and optimizer class; a `SettingsChanged` replaces some of them. ``link_bytes_per_s`` is the
    nominal speed of the adapter at which other hosts reach this rank, 0 where it is not known.
    """

    format: int
    rank: Integer
    size: Size
    intra_rank: Integer
    inter_rank: Integer
    host: str
    pid: int
    device: str
    cpus: list[int]
    unix_s: Seconds
    at_s: Seconds
    settings: dict[str, str]
    versions: dict[str, str]
    link_bytes_per_s: float = 0.0


class SettingsChanged(Record, frozen=True, kw_only=True):
    """Autotuning, a warm-up or the script has changed settings from ``step`` on."""

    step: Integer
    settings: dict[str, str]


class Bucket(Record, frozen=True, kw_only=True):
    """One exchange of a step, in seconds after the step's begin.

    ``ready_s`` is when this rank had the gradients, ``started_s`` when its engine began the
    exchange, and ``ended_s`` when it ended, after the slowest rank had sent its part. A bucket is
    listed in the step in which its exchange ended; its times are negative if they were in the step
    before. ``encode_s`` and ``decode_s`` are the seconds that the codec took of it.
    """

    number: Integer
    nbytes: Integer
    sent_nbytes: Integer
    ready_s: Seconds
    started_s: Seconds
    ended_s: Seconds
    encode_s: Seconds = 0.0
    decode_s: Seconds = 0.0


class Step(Record, frozen=True, kw_only=True):
    """One step of this rank, from the end of the previous one.

    ``phases`` leaves out those of 0 s. ``sent`` and ``received`` are bytes by the host at the other
    end, messages within the host under its own name. ``run_queue_s`` is how long the training
    thread was ready to run and had no core, ``cpu_s`` how long it ran, and ``others_cpu_s`` how
    long the process's other threads ran, such as those of the exchange; None where the system does
    not tell.
    """

    step: Integer
    at_s: Seconds
    seconds: Seconds
    phases: dict[Phase, Seconds]
    samples: Integer | None = None
    sent: dict[str, Integer] = {}
    received: dict[str, Integer] = {}
    buckets: list[Bucket] = []
    run_queue_s: Seconds | None = None
    cpu_s: Seconds | None = None
    others_cpu_s: Seconds | None = None


class GradientTimes(Record, frozen=True, kw_only=True):
    """When each gradient was ready, in seconds after the first one. Recorded in some steps."""

    step: Integer
    ready_s: list[Seconds]
    numel: list[Integer]
    nbytes: list[Integer]
    is_small: list[bool]


class Memory(Record, frozen=True, kw_only=True):
    """Bytes of the process, and of the device's allocator (0 on CPUs)."""

    at_s: Seconds
    rss_nbytes: Integer
    device_nbytes: Integer


class Value(Record, frozen=True, kw_only=True):
    """A number that the script reports, such as its loss."""

    step: Integer
    name: str
    value: float


class ClockOffset(Record, frozen=True, kw_only=True):
    """Rank 0's clock showed ``at_s + offset_s``, give or take ``error_s``."""

    at_s: Seconds
    offset_s: Seconds
    error_s: Seconds


class RunEnd(Record, frozen=True, kw_only=True):
    """The script has ended by itself."""

    at_s: Seconds
    status: int
    phases: dict[Phase, Seconds] = {}
    """Since the end of the last step."""


Line = RunStart | SettingsChanged | Step | GradientTimes | Memory | Value | ClockOffset | RunEnd


# The files of one rank: lines are collected in memory and written about every second.
#
# A file that has become large is followed by another one. Of a long run the first file is kept,
# with the settings and the first steps, and the newest ones: those in between are removed.

FOLDER = "steps"
MAX_FILE_BYTES = 64 * MiB
MAX_FILES = 8
"""The first and the newest seven: half a gigabyte, 10 million steps without buckets."""

_json = msgspec.json.Encoder()


def file_name(rank: int, number: int) -> str:
    """Return the name of a rank's file; ``number`` counts from 0."""
    return f"rank{rank}.jsonl" if number == 0 else f"rank{rank}.{number}.jsonl"


class RecordFile:
    """Appends lines to the files of a rank in ``folder``/steps. Thread-safe.

    Raises OSError: the folder cannot be created, or has a file of this rank already.
    """

    def __init__(self, folder: Path, start: RunStart, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.folder = folder / FOLDER
        self._rank = start.rank
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._number = 0
        self._num_bytes = 0
        make_private_folder(self.folder)
        self._descriptor: int | None = self._open()
        self.write(start)
        self.flush()

    def write(self, line: Line) -> None:
        """Queue a line, which the next `flush` writes."""
        # Steps are many and hold nothing that is not UTF-8; paths and arguments may.
        text = _json.encode(line) + b"\n" if type(line) is Step else codec.encode(line)
        # Without the lock, for appending is atomic: training never waits for the disk.
        self._lines.append(text)

    def flush(self) -> None:
        """Write the queued lines. An error ends the record with a message; the job continues."""
        with self._lock:
            # Others may add lines meanwhile: those are left for the next time.
            text = b"".join([self._lines.popleft() for _ in range(len(self._lines))])
            if self._descriptor is None or not text:
                return
            try:
                if self._num_bytes and self._num_bytes + len(text) > self._max_bytes:
                    self._rotate()
                _write_all(self._descriptor, text)
                self._num_bytes += len(text)
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write the queued lines and close the file."""
        self.flush()
        with self._lock:
            self._close_file()

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        path = str(self.folder / file_name(self._rank, self._number))
        return open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)

    def _rotate(self) -> None:
        self._close_file()
        self._number += 1
        self._descriptor = self._open()
        self._num_bytes = 0
        if self._number >= MAX_FILES:
            oldest = file_name(self._rank, self._number - MAX_FILES + 1)
            (self.folder / oldest).unlink(missing_ok=True)

    def _give_up(self, error: OSError) -> None:
        self._close_file()
        Log(__name__, rank=self._rank).warning(
            "rank %d: the record of steps in %s ends here (%s); training continues.",
            self._rank,
            self.folder,
            error.strerror or error,
        )


def _write_all(descriptor: int, text: bytes) -> None:
    left = memoryview(text)
    while left:
        left = left[os.write(descriptor, left) :]
