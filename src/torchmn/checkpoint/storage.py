"""Where checkpoints lie: the seam between the format and a folder, or memory elsewhere.

A checkpoint is a set of named files. It is written under the name of a draft; `commit` makes it
a checkpoint at once. Whatever has no manifest is none.
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
        """Fill the memory. Raises DataError: the file cannot be read, or ends before."""

    def close(self) -> None:
        """Done."""


class Storage(Protocol):
    """Keeps checkpoints. Every method is local; who calls it stands at each.

    OSError from any method means that this storage failed at it.
    """

    def write(self, draft: str, file: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write one file of a draft; when it returns the file is durable. Any rank."""

    def open(self, checkpoint: str, file: str) -> Reader:
        """Open one file. Any rank. Raises DataError: it is not there or cannot be read."""

    def commit(self, draft: str, checkpoint: str, manifest: bytes) -> None:
        """Make a draft a checkpoint: all of it, or nothing. Rank 0, when all have written."""

    def names(self) -> list[str]:
        """The names of all checkpoints and drafts, also torn ones. Rank 0."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint or a draft; after a crash in the middle it is none. Rank 0."""


class FolderStorage:
    """A folder with one folder for each checkpoint, on a file system that all ranks see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, draft: str, file: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See `Storage.write`."""
        path = self.folder / draft / file
        path.parent.mkdir(exist_ok=True)
        with path.open("wb", buffering=0) as out:
            for piece in pieces:
                rest = memoryview(piece).cast("B")
                while rest:  # a large write may be cut short
                    rest = rest[out.write(rest) :]
            os.fsync(out.fileno())

    def open(self, checkpoint: str, file: str) -> Reader:
        """See `Storage.open`."""
        return FileReader(self.folder / checkpoint / file)

    def commit(self, draft: str, checkpoint: str, manifest: bytes) -> None:
        """See `Storage.commit`: the rename is the moment from which on it counts."""
        self.write(draft, MANIFEST, [manifest])
        _sync_folder(self.folder / draft)
        (self.folder / draft).rename(self.folder / checkpoint)
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
        with suppress(FileNotFoundError):  # no checkpoint any more, from here on
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
        rest = memory.cast("B")
        try:
            self._file.seek(offset)
            while rest:
                num = self._file.readinto(rest)
                if not num:
                    raise DataError(f"{self._name} ends {len(rest)} bytes too early")
                rest = rest[num:]
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
