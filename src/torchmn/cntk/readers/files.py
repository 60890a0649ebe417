"""Opening the files that deserializers read."""

import os
import stat
import threading
from typing import BinaryIO

from torchmn.base.errors import DataError


def open_file(path: str, max_bytes: int | None = None, buffering: int = -1) -> BinaryIO:
    """Open a regular file, not a pipe or device, from which reading may never end.

    Raises DataError: there is no such file, it is not regular, too large, or cannot be opened.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
            raise DataError(f"{path}: {kind}, where a file should be.")
        if max_bytes is not None and status.st_size > max_bytes:
            raise DataError(f"{path}: {status.st_size} bytes, more than {max_bytes}.")
        return open(path, "rb", buffering=buffering)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: the file cannot be read: {reason}.") from error


class ProcessLock:
    """A lock for threads that is separate in each process.

    A thread that holds a `threading.Lock` while another one forks, as a DataLoader does, leaves it
    locked in the new process for ever. This one is a new lock there, and in copies by pickle.
    """

    def __init__(self) -> None:
        self._locks = {os.getpid(): threading.RLock()}

    def __enter__(self) -> None:
        process = os.getpid()
        if process not in self._locks:
            self._locks.setdefault(process, threading.RLock())
        self._locks[process].acquire()

    def __exit__(self, *_: object) -> None:
        self._locks[os.getpid()].release()

    def __reduce__(self) -> tuple[object, ...]:
        return ProcessLock, ()
