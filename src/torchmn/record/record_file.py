"""The files of one rank: lines are collected in memory and written about every second.

A file that has become large is followed by another one. Of a long run the first file is kept, with
the settings and the first steps, and the newest ones: those in between are removed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from pathlib import Path

import msgspec

from torchmn.cluster.units import MiB
from torchmn.control import codec
from torchmn.control.private_files import make_private_folder, open_private
from torchmn.record.records import FORMAT, Line, RunStart, Step

FOLDER = "steps"
MAX_FILE_BYTES = 64 * MiB
MAX_FILES = 8
"""The first and the newest seven: half a gigabyte, 10 million steps without buckets."""

_json = msgspec.json.Encoder()


def file_name(rank: int, number: int) -> str:
    """Of the ``number``-th file of a rank."""
    return f"rank{rank}.jsonl" if number == 0 else f"rank{rank}.{number}.jsonl"


class RecordFile:
    """Appends lines to the files of a rank in ``folder``/steps. From any thread.

    Raises OSError: the folder cannot be made, or the rank has files there.
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
        """Add a line, which is in the file after the next `flush`."""
        # Steps are many and hold nothing that is not UTF-8; paths and arguments may.
        text = _json.encode(line) + b"\n" if type(line) is Step else codec.encode(line)
        self._lines.append(text)

    def flush(self) -> None:
        """Write what was added. A failure ends the record with a message: the job continues."""
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
        """Write what was added and close the file."""
        self.flush()
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> int:
        path = str(self.folder / file_name(self._rank, self._number))
        return open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)

    def _rotate(self) -> None:
        before = self._descriptor
        self._number += 1
        self._descriptor = self._open()
        if before is not None:
            os.close(before)
        self._num_bytes = 0
        if self._number >= MAX_FILES:
            oldest = file_name(self._rank, self._number - MAX_FILES + 1)
            (self.folder / oldest).unlink(missing_ok=True)

    def _give_up(self, error: OSError) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        print(
            f"torchmn: rank {self._rank}: the record of steps in {self.folder} ends here "
            f"({error.strerror or error}); training continues.",
            file=sys.stderr,
            flush=True,
        )


def _write_all(descriptor: int, text: bytes) -> None:
    left = memoryview(text)
    while left:
        left = left[os.write(descriptor, left) :]


__all__ = ["FOLDER", "FORMAT", "RecordFile", "file_name"]
