"""Storage of checkpoints: the interface between the format and a folder, or the memory of hosts.

A checkpoint is a set of named files. It is written under a temporary name; `commit` turns it into a
checkpoint atomically. What has no manifest is not a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from torchmn.errors import DataError

MANIFEST = "manifest.json"


class Reader(Protocol):
    """One file of a checkpoint, open for reading."""

    nbytes: int

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory``. Raises DataError: the file cannot be read, or is too short."""

    def close(self) -> None:
        """Close the file."""


class Storage(Protocol):
    """Stores checkpoints. Every method is local; each says which ranks call it.

    OSError from any method means that this storage failed. ``sees_all_ranks`` says whether rank 0
    can open the files that other ranks have staged, and so check that all are complete.
    """

    sees_all_ranks: bool

    def write(self, staged: str, file: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write one file of a staged checkpoint; it is durable on return. Any rank."""

    def open(self, checkpoint: str, file: str) -> Reader:
        """Open one file. Any rank. Raises DataError: it is missing or cannot be read."""

    def commit(self, staged: str, checkpoint: str, manifest: bytes) -> None:
        """Make a staged checkpoint a checkpoint, atomically. Rank 0, after all have written."""

    def names(self) -> list[str]:
        """The names of all checkpoints, also staged and incomplete ones. Rank 0."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint or a staged one; if interrupted, it is no checkpoint. Rank 0."""


class FolderStorage:
    """A folder with one folder for each checkpoint, on a file system that all ranks see."""

    sees_all_ranks = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, staged: str, file: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See `Storage.write`."""
        path = self.folder / staged / file
        path.parent.mkdir(exist_ok=True)
        with path.open("wb", buffering=0) as out:
            for piece in pieces:
                remaining = memoryview(piece).cast("B")
                while remaining:  # a large write may be cut short
                    remaining = remaining[out.write(remaining) :]
            os.fsync(out.fileno())

    def open(self, checkpoint: str, file: str) -> Reader:
        """See `Storage.open`."""
        return FileReader(self.folder / checkpoint / file)

    def commit(self, staged: str, checkpoint: str, manifest: bytes) -> None:
        """See `Storage.commit`: the checkpoint exists from the rename on."""
        self.write(staged, MANIFEST, [manifest])
        _sync_folder(self.folder / staged)
        (self.folder / staged).rename(self.folder / checkpoint)
        _sync_folder(self.folder)

    def names(self) -> list[str]:
        """See `Storage.names`."""
        try:
            return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """See `Storage.remove`."""
        path = self.folder / name
        with suppress(FileNotFoundError):  # from here on it is not a checkpoint
            (path / MANIFEST).unlink()
        shutil.rmtree(path)


class FileReader:
    """See `Reader`."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            raise DataError(f"{path.name} is missing") from None
        except OSError as error:
            raise DataError(f"{path.name} cannot be opened: {error.strerror}") from error
        self.nbytes = os.fstat(self._file.fileno()).st_size

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `Reader.read_into`."""
        remaining = memory.cast("B")
        try:
            self._file.seek(offset)
            while remaining:
                num = self._file.readinto(remaining)
                if not num:
                    raise DataError(f"{self._name} is {len(remaining)} bytes too short")
                remaining = remaining[num:]
        except OSError as error:
            raise DataError(f"{self._name} cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """See `Reader.close`."""
        self._file.close()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
