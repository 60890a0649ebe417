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

from torchmn.base.errors import SharedMemoryError, UnsupportedError
from torchmn.cluster.units import MiB

SHARED_DIRECTORY = "/dev/shm"


@dataclass(frozen=True)
class ErrorContext:
    """The purpose of the memory and the advice to the user, for error messages."""

    what: str
    cure: str


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
    def create(
        cls, size: int, context: ErrorContext, directory: str = SHARED_DIRECTORY
    ) -> SharedMemorySegment:
        """Create an empty segment, after a check that ``directory`` has room for ``size`` bytes.

        Raises:
            SharedMemoryError: the folder is missing or has too little room.
            UnsupportedError: the system or the folder's file system has no files without names.
        """
        if not hasattr(os, "O_TMPFILE"):
            raise UnsupportedError(
                f"Memory shared between processes for {context.what} needs Linux and this is "
                f"{sys.platform}. {context.cure}"
            )
        # O_CLOEXEC: or programs that the script starts would keep the memory after the ranks' end.
        try:
            memory = cls(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise memory_error_from(error, size, directory, context) from error
        # The file takes no memory before it is written to. That it does not fit would show only
        # then, and by a signal that ends the process.
        facts = os.statvfs(directory)
        if facts.f_bavail * facts.f_frsize < size:
            raise memory_error_from(OSError(errno.ENOSPC, ""), size, directory, context)
        return memory

    @classmethod
    def attach(cls, address: Address) -> SharedMemorySegment:
        """Attach to a segment of another process of this node, which must still have it open.

        Raises SharedMemoryError: it cannot be opened from this process.
        """
        path = f"/proc/{address.pid}/fd/{address.number}"
        try:
            memory = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise SharedMemoryError(_unreachable(path, str(error))) from error
        # The other process may have closed it, and the kernel gives its number to the next file.
        if memory.address(address.pid, address.number) != address:
            raise SharedMemoryError(_unreachable(path, "another file is open there"))
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

    def reserve(self, begin: int, end: int) -> None:
        """Allocate bytes ``begin`` to ``end - 1``. Writing to a page without memory is a SIGBUS.

        Raises OSError: no room.
        """
        # Not by ftruncate(), which makes a sparse file and does not fail if there is no memory.
        if end > begin:
            os.posix_fallocate(self._number, begin, end - begin)

    def append(self, payload: bytes) -> None:
        """Write bytes after the end. Raises OSError: no room."""
        view = memoryview(payload)
        end = self.size
        while view:
            written = os.pwrite(self._number, view, end)
            view, end = view[written:], end + written

    def map_shared(self) -> mmap.mmap:
        """A mapping whose changes are visible to all processes. The size must not be 0."""
        return mmap.mmap(self._number, self.size, access=mmap.ACCESS_WRITE)

    def map_private(self) -> mmap.mmap:
        """A copy-on-write mapping, for readers. The size must not be 0.

        A sample that a reader changes in place changes for that process only.
        """
        return mmap.mmap(self._number, self.size, access=mmap.ACCESS_COPY)

    def __reduce__(self) -> tuple[object, ...]:
        # For spawned DataLoader workers, which attach while their parent is running.
        return SharedMemorySegment.attach, (self.address(),)


def memory_error_from(
    error: OSError, size: int, directory: str, context: ErrorContext
) -> SharedMemoryError | UnsupportedError:
    """Translate an OSError that occurred while ``size`` bytes were allocated in ``directory``."""
    if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
        return UnsupportedError(
            f"The file system of {directory} cannot hold files without a name, as {context.what} "
            f"needs them; tmpfs, ext4 and xfs can. {context.cure}"
        )
    if error.errno == errno.ENOSPC:
        facts = os.statvfs(directory)
        free = facts.f_bavail * facts.f_frsize
        return SharedMemoryError(
            f"{directory} has {free / MiB:.1f} MiB free and {context.what} needs "
            f"{size / MiB:.1f} MiB. {context.cure}"
        )
    if not Path(directory).is_dir():
        return SharedMemoryError(
            f"There is no folder {directory} for {context.what}. {context.cure}"
        )
    return SharedMemoryError(
        f"{directory} could not be used for {context.what}: {error}. {context.cure}"
    )


def _unreachable(path: str, seen: str) -> str:
    return (
        f"Memory shared by this node's ranks cannot be opened at {path}: {seen}. Ranks with the "
        "same host name must run as the same user in one process namespace; else give the "
        "containers different host names."
    )
