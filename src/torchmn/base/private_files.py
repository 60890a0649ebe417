"""Create files and folders that only the current user can read.

Logs and records contain paths, data and the output of scripts.
"""

import os
from contextlib import suppress
from pathlib import Path


def open_private(path: str, flags: int) -> int:
    """An ``opener`` for `open` that creates files with mode 0600."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_private_folder(folder: Path) -> None:
    """Create a folder with mode 0700, and its parents, if it does not exist. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def write_whole(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file atomically: readers see the old or the new content. Raises OSError."""
    # rename() is atomic within one file system, so the draft is made in the same folder.
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    # O_EXCL: a file or link that appears there meanwhile is an error and never written to.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        draft.unlink(missing_ok=True)
        with open(os.open(draft, flags, mode), "wb") as file:
            file.write(content)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
