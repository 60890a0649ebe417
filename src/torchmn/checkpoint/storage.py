"""Storage of checkpoints in a folder.

A checkpoint is a set of named files. It is written under a temporary name; `commit` turns it into a
checkpoint atomically. A folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from torchmn.base.errors import DataError
from torchmn.base.private_files import open_private

MANIFEST = "manifest.json"
_MAX_TEXT_NBYTES = 1_000_000_000


def read_text(reader: FileReader, file: str, begin: bytes) -> bytes:
    """Read a whole JSON file that starts with ``begin``. Local.

    Start and size are checked before memory is allocated: a damaged file may be sparse, and of any
    size. Raises DataError: the file starts otherwise, or is larger than 1 GB.
    """
    head = bytearray(min(len(begin), reader.nbytes))
    reader.read_into(0, memoryview(head))
    if head != begin or reader.nbytes > _MAX_TEXT_NBYTES:
        raise DataError(
            f"{file} is damaged: it has {reader.nbytes} bytes and begins with {bytes(head)!r}"
        )
    raw = bytearray(reader.nbytes)
    reader.read_into(0, memoryview(raw))
    return bytes(raw)


class FolderStorage:
    """A folder with one subfolder for each checkpoint, on a file system that all ranks share.

    Files can be read by the user and, if ``gid`` is given, by the members of that group.
    ``confirm`` is called before each commit and raises to prevent it. Every method is local; each
    says which ranks call it. An OSError from any of them means that the storage failed. Rank 0 can
    open the files that other ranks have staged.

    >>> import pathlib, tempfile
    >>> from torchmn.checkpoint import FolderStorage
    >>> FolderStorage(pathlib.Path(tempfile.mkdtemp())).names()
    []
    """

    def __init__(
        self, folder: Path, *, gid: int | None = None, confirm: Callable[[], None] | None = None
    ) -> None:
        self.folder = folder
        self._gid = gid
        self._confirm = confirm

    def write(self, staged: str, file: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write one file of a staged checkpoint; it is durable on return. Any rank."""
        path = self.folder / staged / file
        # Not the folders above: under the mount point of a file system that is gone, checkpoints
        # would fill another disk, and no later job would find them.
        self.make_folder(path.parent)
        with open(path, "wb", buffering=0, opener=self._open_private) as out:
            for piece in pieces:
                remaining = memoryview(piece).cast("B")
                while remaining:  # Linux writes at most 2 GiB at once
                    remaining = remaining[out.write(remaining) :]
            os.fsync(out.fileno())

    def open(self, checkpoint: str, file: str) -> FileReader:
        """Open a file of a checkpoint. Any rank. Raises DataError: it is missing or unreadable."""
        return FileReader(self.folder / checkpoint / file)

    def commit(self, staged: str, checkpoint: str, manifest: bytes) -> None:
        """Turn a staged checkpoint into a checkpoint, atomically. Rank 0, after all have written.

        The checkpoint exists once its folder is renamed.
        """
        self.write(staged, MANIFEST, [manifest])
        # Else the rename might reach the disk before the names of the files in the folder do.
        _sync_folder(self.folder / staged)
        if self._confirm is not None:
            self._confirm()
        (self.folder / staged).rename(self.folder / checkpoint)
        _sync_folder(self.folder)

    def names(self) -> list[str]:
        """The names of all checkpoints, including staged and incomplete ones. Rank 0."""
        try:
            return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Remove a complete or staged checkpoint. Rank 0.

        If the removal is interrupted, what is left does not count as a checkpoint.
        """
        path = self.folder / name
        with suppress(FileNotFoundError):  # from here on it is not a checkpoint
            (path / MANIFEST).unlink()
        shutil.rmtree(path)

    def make_folder(self, path: Path, *, parents: bool = False) -> None:
        """Create a folder with the permissions of checkpoints, unless it exists."""
        try:
            path.mkdir(mode=0o700, parents=parents)
        except FileExistsError:
            if not path.is_dir():
                raise
            return
        if self._gid is not None:
            os.chown(path, -1, self._gid)
            path.chmod(0o2750)  # files in it get its group

    def make_file(self, path: Path, content: bytes) -> None:
        """Create a small file with the permissions of checkpoints. Raises FileExistsError."""
        with open(path, "xb", buffering=0, opener=self._open_private) as out:
            out.write(content)

    def _open_private(self, path: str, flags: int) -> int:
        descriptor = open_private(path, flags)
        if self._gid is not None:
            os.fchown(descriptor, -1, self._gid)
            os.fchmod(descriptor, 0o640)
        return descriptor


class FileReader:
    """One file of a checkpoint, open for reading."""

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
        """Fill ``memory`` from ``offset`` on. Raises DataError: the file is unreadable or short."""
        remaining = memory.cast("B")
        try:
            self._file.seek(offset)
            while remaining:  # Linux reads at most 2 GiB at once
                num = self._file.readinto(remaining)
                if not num:
                    raise DataError(f"{self._name} is {len(remaining)} bytes too short")
                remaining = remaining[num:]
        except OSError as error:
            raise DataError(f"{self._name} cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
