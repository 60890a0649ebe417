"""Folders for data and checkpoints: there, writable, with room, and as fast as on other hosts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchmn.control.codec import Record
from torchmn.doctor.findings import Finding, slower_than_others
from torchmn.doctor.orders import Request
from torchmn.units import GiB, MiB

_CHUNK_BYTES = 4 * MiB
_QUICK_BYTES, _FULL_BYTES = 64 * MiB, 512 * MiB
_MAX_S = 1.0
_MIN_BYTES_PER_S = 20e6
_RATIO = 0.25
_FULL_SHARE = 0.02


class Folder(Record, frozen=True, kw_only=True):
    """A folder; ``error`` says why nothing could be written there."""

    path: str
    error: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    free_files: int = -1
    write_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0


class DiskFacts(Record, frozen=True, kw_only=True):
    """The folders of the request."""

    folders: list[Folder]


class DiskCheck:
    """See this module."""

    name = "disks"
    facts = DiskFacts
    is_measurement = True

    def examine(self, request: Request, host: str) -> DiskFacts:
        """Write a file into each folder for up to a second, read it again, and remove it."""
        num_bytes = _FULL_BYTES if request.is_full else _QUICK_BYTES
        paths = dict.fromkeys(request.paths or [request.cwd])
        return DiskFacts(folders=[_folder(path, num_bytes) for path in paths])

    def best_of(self, one: DiskFacts, two: DiskFacts) -> DiskFacts:
        """The newer facts of each folder, with the faster rates."""
        import msgspec

        return DiskFacts(
            folders=[
                msgspec.structs.replace(
                    new,
                    write_bytes_per_s=max(old.write_bytes_per_s, new.write_bytes_per_s),
                    read_bytes_per_s=max(old.read_bytes_per_s, new.read_bytes_per_s),
                )
                for old, new in zip(one.folders, two.folders, strict=True)
            ]
        )

    def findings(self, found: Mapping[str, DiskFacts], request: Request) -> Iterator[Finding]:
        """Room in each folder, and rates compared with those of other hosts."""
        rates: dict[tuple[str, str], dict[str, float]] = {}
        for host, facts in found.items():
            for folder in facts.folders:
                yield from _room(host, folder)
                if not folder.error:
                    written, read = folder.write_bytes_per_s, folder.read_bytes_per_s
                    rates.setdefault(("writes", f"to {folder.path}"), {})[host] = written
                    rates.setdefault(("reads", f"from {folder.path}"), {})[host] = read
        for (does, where), by_host in rates.items():
            slower = slower_than_others(by_host, _RATIO)
            for host, rate in by_host.items():
                if host in slower or rate < _MIN_BYTES_PER_S:
                    others = f"{slower[host] / 1e6:.3g}" if host in slower else ""
                    beside = others and f", the other hosts {others}"
                    yield Finding(
                        check="disks",
                        severity="warning",
                        hosts=[host],
                        seen=f"{host} {does} {rate / 1e6:.3g} MB/s {where}{beside}",
                        rule=f"A disk {does} at least {_MIN_BYTES_PER_S / 1e6:.3g} MB/s and "
                        f"{_RATIO:.0%} of what other hosts reach, or data and checkpoints hold up "
                        "training.",
                        cure="Look for another process that uses the disk, a limit of the control "
                        "group (io.max), a failing disk, or a network file system on a slow link; "
                        "or use another folder.",
                        value=rate / 1e6,
                        unit="MB/s",
                    )


def _room(host: str, folder: Folder) -> Iterator[Finding]:
    if folder.error:
        yield Finding(
            check="disks",
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
            check="disks",
            severity="error" if folder.free_bytes < 100 * MiB else "warning",
            hosts=[host],
            seen=f"{folder.path} on {host} has room for {folder.free_bytes / GiB:.3g} GiB{files}",
            rule=f"There is room for checkpoints: {least / GiB:.3g} GiB and 1000 files.",
            cure="Remove old checkpoints and logs, or name another folder.",
            value=folder.free_bytes / GiB,
            unit="GiB",
        )


def _folder(path: str, num_bytes: int) -> Folder:
    try:
        found = os.statvfs(path)
        num_bytes = min(num_bytes, found.f_bavail * found.f_frsize // 4)
        written, read = _measure_rates(Path(path), num_bytes)
    except OSError as error:
        return Folder(path=path, error=error.strerror or str(error))
    return Folder(
        path=path,
        free_bytes=found.f_bavail * found.f_frsize,
        total_bytes=found.f_blocks * found.f_frsize,
        free_files=found.f_favail if found.f_files else -1,
        write_bytes_per_s=written,
        read_bytes_per_s=read,
    )


def _measure_rates(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Bytes per second written to a file, and read from it.

    Each chunk is on the disk before the next one is written, as a checkpoint is at its end. Before
    it is read, this machine forgets what it has of the file; a file server does not.
    """
    chunk = os.urandom(_CHUNK_BYTES)  # not what a file system compresses
    with tempfile.TemporaryFile(dir=folder, prefix=".torchmn-doctor-") as file:
        written, started = 0, time.perf_counter()
        while written < max(num_bytes, 1) and time.perf_counter() - started < _MAX_S:
            written += os.write(file.fileno(), chunk)
            os.fsync(file.fileno())
        write_s = time.perf_counter() - started
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        read, started = 0, time.perf_counter()
        while time.perf_counter() - started < _MAX_S:
            count = len(os.read(file.fileno(), _CHUNK_BYTES))
            if not count:
                break
            read += count
        return written / write_s, read / (time.perf_counter() - started)
