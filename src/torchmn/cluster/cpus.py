"""Find the cores and memory that this process may use, and divide cores among ranks of a node.

There are two binding rules: equal shares of all cores (`assign_cpus`), and shares of the cores next
to each rank's GPU (`cores_near_gpu`). Nothing is bound here: see `os.sched_setaffinity`.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmn.base.errors import UsageError
from torchmn.cluster.gpus import GpuLocality, text_of
from torchmn.cluster.operating_system import require_linux
from torchmn.cluster.units import GiB, KiB


@dataclass(frozen=True, kw_only=True)
class Processors:
    """The logical cores a process may use, in an order that keeps neighbours together.

    ``logical`` holds their numbers sorted by socket, physical core and thread, so that a
    contiguous share holds whole physical cores of one socket. ``physical`` names the physical
    core of each. ``quota`` is the container's limit in cores, or ``None``.

    >>> from torchmn.cluster.cpus import Processors
    >>> Processors(logical=(0, 1), physical=((0, 0), (0, 1))).logical
    (0, 1)
    """

    logical: tuple[int, ...]
    physical: tuple[tuple[int, int], ...]
    quota: float | None = None

    def __post_init__(self) -> None:
        if not self.logical or len(self.logical) != len(self.physical):
            raise UsageError(
                f"Processors needs one physical core per logical core and at least one, got "
                f"{len(self.logical)} logical and {len(self.physical)} physical."
            )


@dataclass(frozen=True, kw_only=True)
class CpuAssignment:
    """The cores to bind a rank to, and the number of threads that it should start.

    >>> from torchmn.cluster.cpus import CpuAssignment
    >>> CpuAssignment(cores=frozenset({2, 3}), num_threads=2).num_threads
    2
    """

    cores: frozenset[int]
    num_threads: int


def available_processors(root: Path = Path("/"), *, pid: int = 0) -> Processors:
    """Return the cores in this process's affinity mask, and its container's CPU quota. Local.

    ``pid`` selects another process of this host. ``root`` has the folders ``sys`` and ``proc``;
    without them every core counts as a physical one. Raises UnsupportedError: this is not Linux.

    Example:
        >>> len(available_processors().logical) >= 1
        True
    """
    require_linux("Finding the cores of a process")
    numbers = os.sched_getaffinity(pid)
    cores = sorted((_physical_core(number, root), number) for number in numbers)
    return Processors(
        logical=tuple(number for _, number in cores),
        physical=tuple(core for core, _ in cores),
        quota=cpu_quota(root),
    )


def assign_cpus(processors: Processors, *, intra_rank: int, intra_size: int) -> CpuAssignment:
    """Return the share of one of ``intra_size`` ranks on the same cores.

    Every rank gets a block of the same number of cores; the remaining cores belong to all
    (for loading data, say), not to the first ranks, since ranks wait for the slowest. With fewer
    cores than ranks every rank gets one and shares it. ``num_threads`` is the number of physical
    cores in the block, at most the rank's part of the quota, at least 1.

    Raises UsageError: ``intra_rank`` is outside 0..intra_size-1.

    >>> four = Processors(logical=(0, 2, 1, 3), physical=((0, 0), (0, 0), (0, 1), (0, 1)))
    >>> share = assign_cpus(four, intra_rank=1, intra_size=2)
    >>> sorted(share.cores), share.num_threads
    ([1, 3], 1)
    """
    if not 0 <= intra_rank < intra_size:
        raise UsageError(f"Rank {intra_rank} of a node is outside 0..{intra_size - 1}.")
    num_cores = len(processors.logical)
    if num_cores < intra_size:
        return CpuAssignment(
            cores=frozenset({processors.logical[intra_rank * num_cores // intra_size]}),
            num_threads=1,
        )
    width = num_cores // intra_size
    block = slice(intra_rank * width, (intra_rank + 1) * width)
    threads = len(set(processors.physical[block]))
    if processors.quota is not None:
        threads = min(threads, int(processors.quota / intra_size))
    return CpuAssignment(
        cores=frozenset(processors.logical[block] + processors.logical[intra_size * width :]),
        num_threads=max(1, threads),
    )


def cores_near_gpu(
    processors: Processors, localities: Sequence[GpuLocality], *, intra_rank: int, intra_size: int
) -> tuple[CpuAssignment, GpuLocality | None]:
    """Return a rank's share of the cores next to its GPU, the ``intra_rank``-th one.

    Ranks whose GPUs are next to the same cores share these. If a rank has no GPU of its own, or
    none of the cores next to it may be used, all ranks share all cores: binding only some of
    them well would make those wait for the others.

    >>> from torchmn.cluster.cpus import Processors, cores_near_gpu
    >>> two = Processors(logical=(0, 1), physical=((0, 0), (0, 1)))
    >>> share, gpu = cores_near_gpu(two, [], intra_rank=1, intra_size=2)  # no GPU is known
    >>> sorted(share.cores), gpu
    ([1], None)
    """
    own = [_within(processors, around.cores) for around in localities[:intra_size]]
    if len(own) < intra_size or not all(own):
        return assign_cpus(processors, intra_rank=intra_rank, intra_size=intra_size), None
    sharing = [rank for rank in range(intra_size) if own[rank] == own[intra_rank]]
    physical = dict(zip(processors.logical, processors.physical, strict=True))
    near = Processors(
        logical=own[intra_rank],
        physical=tuple(physical[core] for core in own[intra_rank]),
        quota=(None if processors.quota is None else processors.quota * len(sharing) / intra_size),
    )
    share = assign_cpus(near, intra_rank=sharing.index(intra_rank), intra_size=len(sharing))
    return share, localities[intra_rank]


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the lowest CPU quota of this process's control groups in cores, or None. Local.

    Reads version 2 (``cpu.max``) up to the root of the hierarchy, else version 1.
    """
    quotas: list[float] = []
    for folder in control_groups("cpu", root):
        quotas += _ratio(text_of(folder / "cpu.max").split())
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quotas += _ratio([text_of(folder / name) for name in names])
    return min(quotas, default=None)


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's control groups and of those above. Local.

    Both versions of control groups count; ``controller`` selects the hierarchy of version 1. Some
    folders may not exist: a container sees the host's path, but its group is the mount itself.
    """
    cgroups = root / "sys/fs/cgroup"
    found = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        # "unified": version 2 beside version 1
        for mount in [cgroups / controller] if controllers else [cgroups, cgroups / "unified"]:
            folder = mount / path.lstrip("/")
            found += [folder, *(level for level in folder.parents if level.is_relative_to(mount))]
    return found


def _within(processors: Processors, cores: frozenset[int]) -> tuple[int, ...]:
    return tuple(core for core in processors.logical if core in cores)


def _ratio(quota_and_period: list[str]) -> list[float]:
    """Return ``[quota / period]``, or an empty list without a limit."""
    if len(quota_and_period) != 2 or not all(text.isdigit() for text in quota_and_period):
        return []  # "max" and -1 mean no limit
    quota, period = map(int, quota_and_period)
    return [quota / period] if quota > 0 and period > 0 else []


def _physical_core(number: int, root: Path) -> tuple[int, int]:
    """Return (socket, core) of a logical core; (0, number) if the system does not report it."""
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    texts = [text_of(topology / name) for name in ("physical_package_id", "core_id")]
    if not all(text.isdigit() for text in texts):
        return (0, number)
    return (int(texts[0]), int(texts[1]))


_NO_LIMIT = 1 << 60  # version 1 writes a number near this where there is no limit


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory in bytes. ``limit`` is the lowest of this process's control groups, or None."""

    total: int
    available: int
    limit: int | None = None


def memory_of_host(root: Path = Path("/")) -> Memory:
    """Read ``/proc/meminfo`` and the limits of control groups; 0 if not reported. Local."""
    values = {}
    for line in text_of(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        values[name] = int(number[0]) * KiB if number and number[0].isdecimal() else 0
    return Memory(
        total=values.get("MemTotal", 0),
        available=values.get("MemAvailable", 0),
        limit=memory_limit(root),
    )


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the lowest memory limit of this process's control groups in bytes, or None. Local."""
    limits = []
    for folder in control_groups("memory", root):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            text = text_of(folder / name)
            if text.isdecimal() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def count_memory_kills(root: Path = Path("/")) -> int | None:
    """Count the processes of this control group that were killed for lack of memory.

    Returns None if unknown. The kernel sends SIGKILL and counts it in ``memory.events`` (version 2)
    or ``memory.oom_control`` (version 1). Linux only.
    """
    for folder in control_groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if count := re.search(r"^oom_kill (\d+)", text_of(folder / name), re.MULTILINE):
                return int(count[1])
    return None


def describe_sigkill(before: int | None, root: Path = Path("/")) -> str:
    """Describe an end by SIGKILL; empty if unknown.

    ``before`` is the result of `count_memory_kills` before the process started: whether the count
    has grown tells a kill for lack of memory from one by another process.
    """
    after = count_memory_kills(root)
    if before is None or after is None:
        return ""
    if after > before:
        limit = memory_limit(root)
        size = "" if limit is None else f", {limit / GiB:.3g} GiB,"
        return f"was ended by SIGKILL: the memory limit of its control group{size} was exceeded"
    return (
        "was ended by SIGKILL, sent by another process: its control group counts no kill for lack "
        "of memory"
    )
