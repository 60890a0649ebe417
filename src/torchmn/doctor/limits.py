"""Check limits of processes and shared memory."""

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchmn.cluster.units import GiB, MiB, counted
from torchmn.control.codec import Record
from torchmn.doctor.findings import Finding, Request

_SHM = "/dev/shm"
_MIN_SHM_BYTES = 256 * MiB
_MIN_FILES, _FILES_PER_RANK = 1024, 8


class LimitFacts(Record, frozen=True, kw_only=True):
    """Soft limits, -1 for unlimited, and the size of /dev/shm in bytes, -1 if it is missing."""

    open_files: int
    locked_bytes: int
    has_infiniband: bool
    shm_bytes: int = -1
    shm_free_bytes: int = -1


def examine(request: Request, host: str) -> LimitFacts:
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


def findings(found: Mapping[str, LimitFacts], request: Request) -> Iterator[Finding]:
    """Compare the limits of each host with what a job needs."""
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
            )
        if facts.has_infiniband and 0 <= facts.locked_bytes < GiB:
            yield Finding(
                severity="warning",
                hosts=[host],
                seen=f"a process on {host} may lock {facts.locked_bytes / MiB:.3g} MiB of "
                "memory, and the host has InfiniBand",
                rule="RDMA locks its buffers: the limit of locked memory should be unlimited.",
                cure="Set 'memlock unlimited' in /etc/security/limits.conf and in the settings "
                "of the scheduler's daemon.",
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
        )
