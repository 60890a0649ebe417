"""Opening the files that deserializers read."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from torchmn.errors import DataError


def open_file(path: str, max_bytes: int | None = None, buffering: int = -1) -> BinaryIO:
    """Open an ordinary file. Pipes and devices, whose reading may never end, are refused.

    Raises DataError: there is no such file, it is none, it is too large, or it cannot be opened.
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
