"""Check the free space in folders of data and checkpoints, and whether they are writable."""

import os
import tempfile
from collections.abc import Iterator, Mapping

from torchmn.cluster.units import GiB, MiB
from torchmn.control.codec import Record
from torchmn.doctor.findings import Finding, Request

_FULL_SHARE = 0.02


class Folder(Record, frozen=True, kw_only=True):
    """A folder on a host; ``error`` is the reason if nothing could be written there."""

    path: str
    error: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    free_files: int = -1


class DiskFacts(Record, frozen=True, kw_only=True):
    """Facts about the folders of the request on one host."""

    folders: list[Folder]


def examine(request: Request, host: str) -> DiskFacts:
    """Write a small file into each folder, and remove it."""
    return DiskFacts(
        folders=[_folder(path) for path in dict.fromkeys(request.paths or [request.cwd])]
    )


def findings(found: Mapping[str, DiskFacts], request: Request) -> Iterator[Finding]:
    """Find folders that cannot be written to, and those with little space."""
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
