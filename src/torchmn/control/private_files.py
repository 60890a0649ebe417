"""Files and folders that only their user can read: logs hold paths, data and what scripts print."""

import os
from pathlib import Path


def open_private(path: str, flags: int) -> int:
    """An ``opener`` for `open`: a new file gets mode 0600."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_private_folder(folder: Path) -> None:
    """Create a folder of mode 0700 and its parents, if it is not there. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
