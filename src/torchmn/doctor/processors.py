"""Check the cores, CPU quotas and memory limits that a host gives its ranks."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchmn.cluster.cpus import available_processors, memory_of_host
from torchmn.cluster.gpus import text_of
from torchmn.cluster.units import GiB, counted
from torchmn.control.codec import Record
from torchmn.doctor.findings import Finding, Request

_MIN_FREE_SHARE = 0.1
_MIN_LIMIT_PER_RANK = 2 * GiB


class ProcessorFacts(Record, frozen=True, kw_only=True):
    """Cores and memory of a host; -1 for a quota or a limit in bytes that does not exist."""

    num_cores: int
    memory_bytes: int
    available_bytes: int
    limit_bytes: int = -1
    quota: float = -1.0


def examine(request: Request, host: str) -> ProcessorFacts:
    """Read the limits of this process."""
    processors, memory = available_processors(), memory_of_host()
    return ProcessorFacts(
        num_cores=len(processors.logical),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=-1 if memory.limit is None else memory.limit,
        quota=-1.0 if processors.quota is None else processors.quota,
    )


def findings(found: Mapping[str, ProcessorFacts], request: Request) -> Iterator[Finding]:
    """Find hosts with fewer cores than slots, or less memory than others."""
    for host, facts in found.items():
        slots = request.slots.get(host, 1)
        yield from _too_few_cores(host, facts, slots)
        yield from _too_little_memory(host, facts, slots, found)


def machine_of_host() -> str:
    """Return a name that containers of one machine share until it boots again. Local."""
    return text_of(Path("/proc/sys/kernel/random/boot_id")) or os.uname().nodename


def _too_few_cores(host: str, facts: ProcessorFacts, slots: int) -> Iterator[Finding]:
    if 0 < facts.quota < facts.num_cores - 0.01:
        yield Finding(
            severity="warning" if facts.quota < slots else "note",
            hosts=[host],
            seen=f"a control group gives {host} {facts.quota:.3g} of {facts.num_cores} cores",
            rule="Threads on more cores than the quota has are paused, and all ranks wait.",
            cure="Raise cpu.max (or --cpus of the container), or -x OMP_NUM_THREADS=the quota.",
        )
    if slots > facts.num_cores:
        yield Finding(
            severity="warning",
            hosts=[host],
            seen=f"{host} has {slots} slots, and may use only {counted(facts.num_cores, 'core')}",
            rule="Each rank has a core of its own.",
            cure="Lower the slots of the host, or widen the affinity of the job (taskset, "
            "--cpus-per-task, cpuset).",
        )


def _too_little_memory(
    host: str, facts: ProcessorFacts, slots: int, found: Mapping[str, ProcessorFacts]
) -> Iterator[Finding]:
    limit = facts.limit_bytes
    if 0 < limit < 0.9 * facts.memory_bytes:
        others = [_usable(each) for other, each in found.items() if other != host]
        is_least = bool(others) and limit < 0.5 * sorted(others)[len(others) // 2]
        is_small = limit < slots * _MIN_LIMIT_PER_RANK
        yield Finding(
            severity="warning" if is_least or is_small else "note",
            hosts=[host],
            seen=f"a control group gives {host} {limit / GiB:.3g} of {facts.memory_bytes / GiB:.3g}"
            " GiB of memory",
            rule=f"Hosts have equal limits, at least {_MIN_LIMIT_PER_RANK / GiB:.3g} GiB a rank: "
            "the kernel kills a rank that needs more.",
            cure="Ask the scheduler for more memory, or raise memory.max (--memory of the "
            "container).",
        )
    if facts.memory_bytes and facts.available_bytes < _MIN_FREE_SHARE * facts.memory_bytes:
        yield Finding(
            severity="warning",
            hosts=[host],
            seen=f"{facts.available_bytes / GiB:.3g} of {facts.memory_bytes / GiB:.3g} GiB of "
            f"memory are available on {host}",
            rule=f"At least {_MIN_FREE_SHARE:.0%} are available before a job.",
            cure="End what is left of other jobs (ps -eo pid,rss,comm --sort -rss).",
        )


def _usable(facts: ProcessorFacts) -> int:
    return min(facts.memory_bytes, facts.limit_bytes if facts.limit_bytes > 0 else 1 << 62)
