"""Limits of processes, shared memory, and the room in folders of data and checkpoints."""

import os
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchmn.cluster.units import GiB, MiB, counted
from torchmn.control.codec import Record
from torchmn.doctor.findings import Finding, Request

_SHM = "/dev/shm"
_MIN_SHM_BYTES = 256 * MiB
_MIN_FILES, _FILES_PER_RANK = 1024, 8


class LimitFacts(Record, frozen=True, kw_only=True):
    """Soft limits, -1 for none, and the size of /dev/shm in bytes, -1 if it is not there."""

    open_files: int
    locked_bytes: int
    has_infiniband: bool
    shm_bytes: int = -1
    shm_free_bytes: int = -1


class LimitCheck:
    """See this module."""

    name = "limits"
    facts = LimitFacts

    def examine(self, request: Request, host: str) -> LimitFacts:
        """Read the limits."""
        shm = {}
        if os.path.isdir(_SHM):
            found = os.statvfs(_SHM)
            shm = {
                "shm_bytes": found.f_blocks * found.f_frsize,
                "shm_free_bytes": found.f_bavail * found.f_frsize,
            }
        adapters = Path("/sys/class/infiniband")
        return LimitFacts(
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            has_infiniband=adapters.is_dir() and any(adapters.iterdir()),
            **shm,
        )

    def findings(self, found: Mapping[str, LimitFacts], request: Request) -> Iterator[Finding]:
        """Each host by itself: these limits are needed in full."""
        for host, facts in found.items():
            yield from _shared_memory(host, facts, request.slots.get(host, 1))
            needed = max(_MIN_FILES, _FILES_PER_RANK * request.num_ranks)
            if 0 <= facts.open_files < needed:
                yield Finding(
                    severity="warning",
                    hosts=[host],
                    seen=f"a process on {host} may open {facts.open_files} files",
                    rule=f"A rank needs some {needed} for its connections and data.",
                    cure="Raise it with ulimit -n, in /etc/security/limits.conf or in the settings "
                    "of the scheduler's daemon.",
                    value=facts.open_files,
                    unit="files",
                )
            if facts.has_infiniband and 0 <= facts.locked_bytes < GiB:
                yield Finding(
                    severity="warning",
                    hosts=[host],
                    seen=f"a process on {host} may lock {facts.locked_bytes / MiB:.3g} MiB of "
                    "memory, and the host has InfiniBand",
                    rule="RDMA locks its buffers: the limit of locked memory is to be unlimited.",
                    cure="Set 'memlock unlimited' in /etc/security/limits.conf and in the settings "
                    "of the scheduler's daemon.",
                    value=facts.locked_bytes / MiB,
                    unit="MiB",
                )


def _shared_memory(host: str, facts: LimitFacts, slots: int) -> Iterator[Finding]:
    needed = max(_MIN_SHM_BYTES, slots * _MIN_SHM_BYTES // 2)
    if facts.shm_free_bytes < needed:
        there = f"{facts.shm_free_bytes / MiB:.4g} of {facts.shm_bytes / MiB:.4g} MiB are free"
        seen = f"in /dev/shm of {host} {there}" if facts.shm_bytes >= 0 else f"{host} has no {_SHM}"
        yield Finding(
            severity="warning",
            hosts=[host],
            seen=seen,
            rule=f"Ranks of one host and DataLoader workers share memory there: "
            f"{needed / MiB:.4g} MiB for {counted(slots, 'rank')}.",
            cure="Remove what is left there, or make it larger: mount -o remount,size=50% "
            "/dev/shm; of a container: --shm-size=8g or --ipc=host.",
            value=max(0, facts.shm_free_bytes) / MiB,
            unit="MiB",
        )


_FULL_SHARE = 0.02


class Folder(Record, frozen=True, kw_only=True):
    """A folder; ``error`` says why nothing could be written there."""

    path: str
    error: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    free_files: int = -1


class DiskFacts(Record, frozen=True, kw_only=True):
    """The folders of the request."""

    folders: list[Folder]


class DiskCheck:
    """See this module."""

    name = "disks"
    facts = DiskFacts

    def examine(self, request: Request, host: str) -> DiskFacts:
        """Write a small file into each folder, and remove it."""
        return DiskFacts(
            folders=[_folder(path) for path in dict.fromkeys(request.paths or [request.cwd])]
        )

    def findings(self, found: Mapping[str, DiskFacts], request: Request) -> Iterator[Finding]:
        """What cannot be written, and where there is little room."""
        for host, facts in found.items():
            for folder in facts.folders:
                yield from _room(host, folder)


def _room(host: str, folder: Folder) -> Iterator[Finding]:
    if folder.error:
        yield Finding(
            severity="error",
            hosts=[host],
            seen=f"{host} cannot write to {folder.path}: {folder.error}",
            rule="Every host can write to the folders of checkpoints and logs.",
            cure="Create the folder, mount its file system, correct its permissions, or name "
            "another one with --path.",
        )
        return
    least = min(10 * GiB, max(GiB, int(folder.total_bytes * _FULL_SHARE)))
    if folder.free_bytes < least or 0 <= folder.free_files < 1000:
        files = f", {folder.free_files} files" if folder.free_files >= 0 else ""
        yield Finding(
            severity="error" if folder.free_bytes < 100 * MiB else "warning",
            hosts=[host],
            seen=f"{folder.path} on {host} has room for {folder.free_bytes / GiB:.3g} GiB{files}",
            rule=f"There is room for checkpoints: {least / GiB:.3g} GiB and 1000 files.",
            cure="Remove old checkpoints and logs, or name another folder.",
            value=folder.free_bytes / GiB,
            unit="GiB",
        )


def _folder(path: str) -> Folder:
    try:
        found = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path, prefix=".torchmn-doctor-") as file:
            file.write(b"torchmn")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Folder(path=path, error=error.strerror or str(error))
    return Folder(
        path=path,
        free_bytes=found.f_bavail * found.f_frsize,
        total_bytes=found.f_blocks * found.f_frsize,
        free_files=found.f_favail if found.f_files else -1,
    )
