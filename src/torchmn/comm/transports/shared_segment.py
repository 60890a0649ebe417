"""Memory shared by processes of a node that is not left behind after a crash.

It is a file without a name (``O_TMPFILE``) in a file system in memory. Other processes open it
through ``/proc/<pid>/fd/<number>`` of the process that created it. The kernel frees it when no
process has it open or mapped any more, however the processes ended.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

from torchmn.base.errors import UnsupportedError
from torchmn.cluster.units import MiB

SHARED_DIRECTORY = "/dev/shm"
_WHAT = "the exchange between this node's ranks"
_CURE = "Make the folder larger (docker: --shm-size)."


@dataclass(frozen=True)
class Address:
    """The address of a `SharedMemorySegment` for other processes of the node.

    Device, inode and size are there to find out whether the number belongs to another file now.
    """

    pid: int
    number: int
    device: int
    inode: int
    size: int


class SharedMemorySegment:
    """Memory in a file without a name, created by one process, attached by others. Local."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._close = weakref.finalize(self, os.close, number)

    @classmethod
    def create(cls, size: int, directory: str = SHARED_DIRECTORY) -> SharedMemorySegment:
        """Create a segment of ``size`` bytes, whose pages are allocated.

        Raises UnsupportedError: the folder is missing or has too little room, or the system or the
        folder's file system has no files without names.
        """
        if not hasattr(os, "O_TMPFILE"):
            raise UnsupportedError(
                f"Memory shared between processes for {_WHAT} needs Linux and this is "
                f"{sys.platform}."
            )
        try:
            # O_CLOEXEC: or programs that the script starts would keep it after the ranks' end.
            memory = cls(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
            # Not by ftruncate(), which makes a sparse file and does not fail if there is no memory:
            # writing to a page without memory is a SIGBUS.
            os.posix_fallocate(memory._number, 0, size)
        except OSError as error:
            raise UnsupportedError(_problem(error, size, directory)) from error
        return memory

    @classmethod
    def attach(cls, address: Address) -> SharedMemorySegment:
        """Attach to a segment of another process of this node, which must still have it open.

        Raises UnsupportedError: it cannot be opened from this process.
        """
        path = f"/proc/{address.pid}/fd/{address.number}"
        try:
            memory = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise UnsupportedError(_unreachable(path, str(error))) from error
        # The other process may have closed it, and the kernel gives its number to the next file.
        if memory.address(address.pid, address.number) != address:
            raise UnsupportedError(_unreachable(path, "another file is open there"))
        return memory

    @property
    def size(self) -> int:
        """The size in bytes."""
        return os.fstat(self._number).st_size

    def address(self, pid: int | None = None, number: int | None = None) -> Address:
        """The address for other processes, valid as long as this process keeps the segment."""
        facts = os.fstat(self._number)
        return Address(
            pid=os.getpid() if pid is None else pid,
            number=self._number if number is None else number,
            device=facts.st_dev,
            inode=facts.st_ino,
            size=facts.st_size,
        )

    def map_shared(self) -> mmap.mmap:
        """A mapping whose changes are visible to all processes. The size must not be 0."""
        return mmap.mmap(self._number, self.size, access=mmap.ACCESS_WRITE)


def _problem(error: OSError, size: int, directory: str) -> str:
    """Describe an error that occurred while ``size`` bytes were allocated in ``directory``."""
    if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
        return (
            f"The file system of {directory} cannot hold files without a name, as {_WHAT} needs "
            "them; tmpfs, ext4 and xfs can."
        )
    if error.errno == errno.ENOSPC:
        facts = os.statvfs(directory)
        free = facts.f_bavail * facts.f_frsize
        return (
            f"{directory} has {free / MiB:.1f} MiB free and {_WHAT} needs {size / MiB:.1f} MiB. "
            f"{_CURE}"
        )
    if not Path(directory).is_dir():
        return f"There is no folder {directory} for {_WHAT}."
    return f"{directory} could not be used for {_WHAT}: {error}."


def _unreachable(path: str, seen: str) -> str:
    return (
        f"Memory shared by this node's ranks cannot be opened at {path}: {seen}. Ranks with the "
        "same host name must run as the same user in one process namespace; else give the "
        "containers different host names."
    )
