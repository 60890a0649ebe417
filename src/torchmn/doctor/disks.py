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


class DiskFacts(Record, frozen=True, kw_only=True):
    """The folders of the request."""

    folders: list[Folder]


class DiskCheck:
    """See this module."""

    name = "disks"
    facts = DiskFacts
    is_measurement = True

    def examine(self, request: Request, host: str) -> DiskFacts:
        """Write a file into each folder for up to a second, and remove it."""
        num_bytes = _FULL_BYTES if request.is_full else _QUICK_BYTES
        paths = dict.fromkeys(request.paths or [request.cwd])
        return DiskFacts(folders=[_folder(path, num_bytes) for path in paths])

    def best_of(self, one: DiskFacts, two: DiskFacts) -> DiskFacts:
        """The faster measurement of each folder."""
        pairs = zip(one.folders, two.folders, strict=True)
        return DiskFacts(folders=[max(p, key=lambda each: each.write_bytes_per_s) for p in pairs])

    def findings(self, found: Mapping[str, DiskFacts], request: Request) -> Iterator[Finding]:
        """Room in each folder, and rates compared with those of other hosts."""
        rates: dict[str, dict[str, float]] = {}
        for host, facts in found.items():
            for folder in facts.folders:
                yield from _room(host, folder)
                if not folder.error:
                    rates.setdefault(folder.path, {})[host] = folder.write_bytes_per_s
        for path, by_host in rates.items():
            slower = slower_than_others(by_host, _RATIO)
            for host, rate in by_host.items():
                if host in slower or rate < _MIN_BYTES_PER_S:
                    others = f"{slower[host] / 1e6:.3g}" if host in slower else ""
                    beside = others and f", the other hosts {others}"
                    yield Finding(
                        check="disks",
                        severity="warning",
                        hosts=[host],
                        seen=f"{host} writes {rate / 1e6:.3g} MB/s to {path}{beside}",
                        rule=f"A disk writes at least {_MIN_BYTES_PER_S / 1e6:.3g} MB/s and "
                        f"{_RATIO:.0%} of what other hosts reach, or checkpoints hold up training.",
                        cure="Look for another process that writes there, a limit of the control "
                        "group (io.max), a failing disk, or a network file system on a slow link; "
                        "or write checkpoints elsewhere.",
                        value=rate / 1e6,
                        unit="MB/s",
                    )


def _room(host: str, folder: Folder) -> Iterator[Finding]:
    if folder.error:
        yield Finding(
            check="disks",
            severity="ill",
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
            severity="ill" if folder.free_bytes < 100 * MiB else "warning",
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
        rate = _write_rate(Path(path), min(num_bytes, found.f_bavail * found.f_frsize // 4))
    except OSError as error:
        return Folder(path=path, error=error.strerror or str(error))
    return Folder(
        path=path,
        free_bytes=found.f_bavail * found.f_frsize,
        total_bytes=found.f_blocks * found.f_frsize,
        free_files=found.f_favail if found.f_files else -1,
        write_bytes_per_s=rate,
    )


def _write_rate(folder: Path, num_bytes: int) -> float:
    """Each chunk is on the disk before the next one is written, as a checkpoint is at its end."""
    chunk = os.urandom(_CHUNK_BYTES)  # not what a file system compresses
    with tempfile.TemporaryFile(dir=folder, prefix=".torchmn-doctor-") as file:
        written, started = 0, time.perf_counter()
        while written < max(num_bytes, 1) and time.perf_counter() - started < _MAX_S:
            written += os.write(file.fileno(), chunk)
            os.fsync(file.fileno())
        return written / (time.perf_counter() - started)
