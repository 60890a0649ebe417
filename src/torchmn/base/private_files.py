"""Files and folders that only their user can read: logs hold paths, data and what scripts print."""

import os
from contextlib import suppress
from pathlib import Path


def open_private(path: str, flags: int) -> int:
    """An ``opener`` for `open`: a new file gets mode 0600."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_private_folder(folder: Path) -> None:
    """Create a folder of mode 0700 and its parents, if it is not there. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def write_whole(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file at once: who reads it sees all of it, or what was there. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
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
