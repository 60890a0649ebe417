"""Cores and memory: their speed, who else uses them, and the limits of control groups.

All cores are measured at once, since ranks use them at once, in several short windows of which the
best counts: what disturbs only one of them is no fault of the host. A core's *share* is the part of
a window that the measuring thread ran; the rest of it another process had the core.
"""

from __future__ import annotations

import hashlib
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from torchmn.control.codec import Record
from torchmn.doctor.findings import Finding, listed, slower_than_others
from torchmn.doctor.orders import Request
from torchmn.errors import TopologyError
from torchmn.topology import available_processors, memory_nodes, read_launcher_env
from torchmn.topology.cpus import control_groups
from torchmn.topology.memory import memory_of_host
from torchmn.units import GiB, MiB, counted

_NUM_WINDOWS, _WINDOW_S = 4, 0.15
_ITERATIONS = 20_000
_COPY_BYTES, _NUM_COPIES = 64 * MiB, 6
_MIN_SHARE = 0.75
_MIN_SPEED = 0.75
_MIN_COPY_SPEED = 0.6
_MIN_FREE_SHARE = 0.1
_MIN_LIMIT_PER_RANK = 2 * GiB
_BUSY = 0.3
_MAX_REMOTE_SHARE, _MIN_REMOTE_BYTES = 0.3, 256 * MiB


class Core(Record, frozen=True, kw_only=True):
    """A core in its best window: units of work per second, and its share, from 0 to 1."""

    number: int
    speed: float
    share: float


class OtherProcess(Record, frozen=True, kw_only=True):
    """A process that used this number of cores while the cores were measured."""

    pid: int
    name: str
    cores_used: float
    last_core: int


class BoundRank(Record, frozen=True, kw_only=True):
    """A rank that runs on this host now, the cores that it may use, and bytes of its memory.

    ``remote_bytes`` are on memory nodes to which none of these cores belongs.
    """

    pid: int
    rank: int
    cores: list[int]
    memory_bytes: int = 0
    remote_bytes: int = 0


class ProcessorFacts(Record, frozen=True, kw_only=True):
    """Bytes of memory are -1 where there is no limit, as is the quota of cores.

    ``machine`` is equal for containers of one machine, and empty where it is unknown.
    """

    model: str
    cores: list[Core]
    copied_bytes_per_s: float
    memory_bytes: int
    available_bytes: int
    limit_bytes: int = -1
    quota: float = -1.0
    throttled_s: float = 0.0
    others: list[OtherProcess] = []
    ranks: list[BoundRank] = []
    machine: str = ""

    @property
    def clock(self) -> float:
        """The speed of the fastest core while it runs."""
        return max(core.speed / max(core.share, 1e-9) for core in self.cores)

    @property
    def num_cores(self) -> int:
        """How many cores may be used."""
        return len(self.cores)


class ProcessorCheck:
    """See this module."""

    name = "processors"
    facts = ProcessorFacts
    is_measurement = True

    def examine(self, request: Request, host: str) -> ProcessorFacts:
        """Keep all cores busy for about a second."""
        processors, memory = available_processors(), memory_of_host()
        ticks, throttled_s = _ticks_by_process(), _throttled_s()
        started = time.monotonic()
        cores = _measure_cores(processors.logical)
        others = _busy_processes(ticks, time.monotonic() - started, processors.logical)
        throttled_s = _throttled_s() - throttled_s
        return ProcessorFacts(
            machine=machine_of_host(),
            model=_model(),
            cores=cores,
            copied_bytes_per_s=_copy_rate(min(_COPY_BYTES, memory.available // 8)),
            memory_bytes=memory.total,
            available_bytes=memory.available,
            limit_bytes=-1 if memory.limit is None else memory.limit,
            quota=-1.0 if processors.quota is None else processors.quota,
            throttled_s=throttled_s,
            others=others,
            ranks=list(_bound_ranks()),
        )

    def best_of(self, one: ProcessorFacts, two: ProcessorFacts) -> ProcessorFacts:
        """The better measurement of each core and of memory; all else is that of now."""
        import msgspec

        before = {core.number: core for core in one.cores}
        return msgspec.structs.replace(
            two,
            cores=[
                max(core, before.get(core.number, core), key=lambda each: each.speed)
                for core in two.cores
            ],
            copied_bytes_per_s=max(one.copied_bytes_per_s, two.copied_bytes_per_s),
        )

    def findings(self, found: Mapping[str, ProcessorFacts], request: Request) -> Iterator[Finding]:
        """Limits first, then who else uses the cores, then speeds beside those of other hosts."""
        for host, facts in found.items():
            slots = request.slots.get(host, 1)
            yield from _too_few_cores(host, facts, slots)
            yield from _too_little_memory(host, facts, slots, found)
            yield from _shared_cores(host, facts)
            yield from _ranks_on_one_core(host, facts)
            yield from _remote_memory(host, facts)
        clocks = _clocks_of_machines(found)
        for host, median in slower_than_others(clocks, _MIN_SPEED).items():
            yield Finding(
                check="processors",
                severity="warning",
                hosts=[host],
                seen=f"a core of {host} ({found[host].model}) runs at {clocks[host] / median:.0%} "
                "of the speed of the other hosts' cores",
                rule=f"Cores of all hosts are equally fast: at least {_MIN_SPEED:.0%}. All ranks "
                "wait for the slowest.",
                cure="Look at its temperature and at the frequency governor (cpupower "
                "frequency-info), or leave the host out.",
                value=clocks[host] / median,
                unit="of the others",
            )
        copies = {host: facts.copied_bytes_per_s for host, facts in found.items()}
        for host, median in slower_than_others(copies, _MIN_COPY_SPEED).items():
            yield Finding(
                check="processors",
                severity="warning",
                hosts=[host],
                seen=f"{host} copies {copies[host] / 1e9:.3g} GB/s in memory, the other hosts "
                f"{median / 1e9:.3g}",
                rule=f"Memory of all hosts is equally fast: at least {_MIN_COPY_SPEED:.0%}.",
                cure="Look for a process that uses the memory's bandwidth, a memory.high limit, "
                "swapping, and missing memory modules (dmidecode -t memory).",
                value=copies[host] / 1e9,
                unit="GB/s",
            )


def machine_of_host() -> str:
    """A name that is equal for containers of one machine, until it boots again. Local."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _clocks_of_machines(found: Mapping[str, ProcessorFacts]) -> dict[str, float]:
    """By host the clock of its machine, the fastest that one of its containers has seen."""
    clocks: dict[str, float] = {}
    machines = {host: facts.machine or host for host, facts in found.items()}
    for host, facts in found.items():
        clocks[machines[host]] = max(facts.clock, clocks.get(machines[host], 0.0))
    return {host: clocks[machine] for host, machine in machines.items()}


# ---- findings of one host -----------------------------------------------------------------------


def _too_few_cores(host: str, facts: ProcessorFacts, slots: int) -> Iterator[Finding]:
    if 0 < facts.quota < facts.num_cores - 0.01:
        paused = f"; it was paused for {facts.throttled_s:.2g} s" if facts.throttled_s > 0 else ""
        yield Finding(
            check="processors",
            severity="warning" if facts.throttled_s > 0 or facts.quota < slots else "note",
            hosts=[host],
            seen=f"a control group gives {host} {facts.quota:.3g} of {facts.num_cores} cores"
            f"{paused}",
            rule="Threads on more cores than the quota has are paused, and all ranks wait.",
            cure="Raise cpu.max (or --cpus of the container), or set --threads to the quota.",
            value=facts.quota,
            unit="cores",
        )
    if slots > facts.num_cores:
        yield Finding(
            check="processors",
            severity="warning",
            hosts=[host],
            seen=f"{host} has {slots} slots, and may use only {counted(facts.num_cores, 'core')}",
            rule="Each rank has a core of its own.",
            cure="Lower the slots of the host, or widen the affinity of the job (taskset, "
            "--cpus-per-task, cpuset).",
            value=facts.num_cores,
            unit="cores",
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
            check="processors",
            severity="warning" if is_least or is_small else "note",
            hosts=[host],
            seen=f"a control group gives {host} {limit / GiB:.3g} of {facts.memory_bytes / GiB:.3g}"
            " GiB of memory",
            rule=f"Hosts have equal limits, at least {_MIN_LIMIT_PER_RANK / GiB:.3g} GiB a rank: "
            "the kernel kills a rank that needs more.",
            cure="Ask the scheduler for more memory, or raise memory.max (--memory of the "
            "container).",
            value=limit / GiB,
            unit="GiB",
        )
    if facts.memory_bytes and facts.available_bytes < _MIN_FREE_SHARE * facts.memory_bytes:
        yield Finding(
            check="processors",
            severity="warning",
            hosts=[host],
            seen=f"{facts.available_bytes / GiB:.3g} of {facts.memory_bytes / GiB:.3g} GiB of "
            f"memory are available on {host}",
            rule=f"At least {_MIN_FREE_SHARE:.0%} are available before a job.",
            cure="End what is left of other jobs (ps -eo pid,rss,comm --sort -rss).",
            value=facts.available_bytes / GiB,
            unit="GiB",
        )


def _usable(facts: ProcessorFacts) -> int:
    return min(facts.memory_bytes, facts.limit_bytes if facts.limit_bytes > 0 else 1 << 62)


def _shared_cores(host: str, facts: ProcessorFacts) -> Iterator[Finding]:
    shared = {core.number: core.share for core in facts.cores if core.share < _MIN_SHARE}
    if not shared or facts.throttled_s > 0:
        return
    busy = [
        f"{each.name} (process {each.pid}) uses {counted(each.cores_used, 'core', '.2g')}"
        for each in facts.others
        if each.last_core in shared
    ]
    least = min(shared.values())
    cores, verb, each = (
        ("core", "is", "it") if len(shared) == 1 else ("cores", "are", "one of them")
    )
    cure = "End that process, move it to other cores (taskset -cp), or leave its cores out."
    if not busy:
        cure = (
            "No process on this host uses them: look for steal time (st in top), which a virtual "
            "machine has when its host is busy, and for processes outside of this container; or "
            "leave these cores out."
        )
    yield Finding(
        check="processors",
        severity="warning",
        hosts=[host],
        seen=f"{cores} {listed([str(core) for core in shared])} of {host} {verb} shared: our "
        f"thread gets {least:.0%} of {each}{': ' + '; '.join(busy[:3]) if busy else ''}",
        rule=f"A rank gets at least {_MIN_SHARE:.0%} of each of its cores: all ranks wait for the "
        "slowest.",
        cure=cure,
        value=least,
        unit="of a core",
    )


def _ranks_on_one_core(host: str, facts: ProcessorFacts) -> Iterator[Finding]:
    on: dict[int, dict[int, BoundRank]] = {}
    for each in facts.ranks:  # of a rank, its agent and its workers one counts
        if len(each.cores) == 1 and facts.num_cores > 1:
            on.setdefault(each.cores[0], {})[each.rank] = each
    for core, ranks in on.items():
        if len(ranks) > 1:
            names = " and ".join(f"{rank} (process {ranks[rank].pid})" for rank in sorted(ranks))
            yield Finding(
                check="processors",
                severity="warning",
                hosts=[host],
                seen=f"ranks {names} are bound to the same core {core} of {host}, which has "
                f"{facts.num_cores}",
                rule="Ranks are bound to cores of their own.",
                cure="Start them with `torchmn run`, which divides the cores (--show-binding), or "
                "correct the launcher's binding (--bind-to core, --cpu-bind=cores).",
                value=float(len(ranks)),
                unit="ranks",
            )


def _remote_memory(host: str, facts: ProcessorFacts) -> Iterator[Finding]:
    for rank in facts.ranks:
        share = rank.remote_bytes / max(rank.memory_bytes, 1)
        cores = listed([*map(str, rank.cores)])
        if rank.remote_bytes >= _MIN_REMOTE_BYTES and share > _MAX_REMOTE_SHARE:
            yield Finding(
                check="processors",
                severity="warning",
                hosts=[host],
                seen=f"{share:.0%} of the memory of rank {rank.rank} (process {rank.pid}) on "
                f"{host} belongs to another socket than its cores ({cores})",
                rule=f"At most {_MAX_REMOTE_SHARE:.0%} of a rank's memory is on other memory nodes "
                "than its cores, which read it more slowly.",
                cure="Bind ranks before they allocate memory: torchmn run does, or numactl "
                "--membind for other launchers. Memory of the node that is full is taken "
                "elsewhere: look at numastat.",
                value=share,
                unit="of its memory",
            )


# ---- measurements on a host ---------------------------------------------------------------------


def _measure_cores(cores: tuple[int, ...]) -> list[Core]:
    """Each core in its best window, while all of them are busy."""
    best = {core: Core(number=core, speed=0.0, share=0.0) for core in cores}
    together = threading.Barrier(len(cores))

    def work(core: int) -> None:
        with suppress(OSError, AttributeError):  # a core that has gone, or a system without them
            os.sched_setaffinity(0, {core})  # of this thread
        for _ in range(_NUM_WINDOWS):
            together.wait()
            count, ran, started = 0, time.thread_time(), time.perf_counter()
            while (took := time.perf_counter() - started) < _WINDOW_S:
                # in C, without the interpreter's lock, and in the core's own caches
                hashlib.pbkdf2_hmac("sha256", b"torchmn", b"doctor", _ITERATIONS)
                count += 1
            took = time.perf_counter() - started
            share = min(1.0, (time.thread_time() - ran) / took)
            if count / took > best[core].speed:
                best[core] = Core(number=core, speed=count / took, share=share)

    threads = [threading.Thread(target=work, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(best.values())


def _copy_rate(num_bytes: int) -> float:
    """Bytes read and written per second by the best of several copies."""
    import numpy as np

    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    best = float("inf")
    for _ in range(_NUM_COPIES):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return 2 * num_bytes / best


def _throttled_s() -> float:
    """How long control groups have paused this process and its neighbours for their quota."""
    longest = 0.0
    for folder in control_groups("cpu"):
        with suppress(OSError, ValueError):
            for line in (folder / "cpu.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name in ("throttled_usec", "throttled_time"):
                    unit = 1e-6 if name == "throttled_usec" else 1e-9
                    longest = max(longest, int(value) * unit)
    return longest


def _ticks_by_process() -> dict[int, tuple[int, int, str]]:
    """Ticks used so far, the core used last, and the name, of each process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            head, _, rest = (entry / "stat").read_text().rpartition(")")
            fields = rest.split()
            ticks = int(fields[11]) + int(fields[12])
            found[int(entry.name)] = (ticks, int(fields[36]), head.partition("(")[2])
    return found


def _busy_processes(
    before: Mapping[int, tuple[int, int, str]], seconds: float, cores: tuple[int, ...]
) -> list[OtherProcess]:
    """Who else used much of these cores since ``before``, the busiest first."""
    per_s = os.sysconf("SC_CLK_TCK")
    found = []
    for pid, (ticks, core, name) in _ticks_by_process().items():
        used = (ticks - before.get(pid, (ticks, 0, ""))[0]) / per_s / seconds
        if used > _BUSY and core in cores and pid != os.getpid():
            found.append(OtherProcess(pid=pid, name=name, cores_used=used, last_core=core))
    return sorted(found, key=lambda each: -each.cores_used)[:8]


def _bound_ranks() -> Iterator[BoundRank]:
    """Ranks in this host's network: hosts that are containers may see each other's processes."""
    network = _network_of("self")
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, TopologyError, ValueError):
            if _network_of(entry.name) != network:
                continue
            words = (entry / "environ").read_bytes().split(b"\0")
            env = dict(word.decode(errors="replace").partition("=")[::2] for word in words)
            place = read_launcher_env(env)
            if place is not None and int(entry.name) != os.getpid():
                cores = os.sched_getaffinity(int(entry.name))
                maps = entry / "numa_maps"  # not there in kernels without memory nodes
                text = maps.read_text() if maps.exists() else ""
                whole, remote = memory_by_place(text, cores)
                yield BoundRank(
                    pid=int(entry.name),
                    rank=place.rank,
                    cores=sorted(cores),
                    memory_bytes=whole,
                    remote_bytes=remote,
                )


def memory_by_place(
    numa_maps: str, cores: Iterable[int], root: Path = Path("/")
) -> tuple[int, int]:
    """Bytes that a process has in memory, and those on other memory nodes than its cores'.

    ``numa_maps`` is the text of the kernel's file of that name.
    """
    own = set(memory_nodes(frozenset(cores), root))
    whole = remote = 0
    for line in numa_maps.splitlines():
        words = dict(word.partition("=")[::2] for word in line.split())
        page_bytes = int(words.get("kernelpagesize_kB", "4")) * 1024
        for name, count in words.items():
            if name[:1] == "N" and name[1:].isdigit():
                whole += int(count) * page_bytes
                remote += int(count) * page_bytes * (bool(own) and int(name[1:]) not in own)
    return whole, remote


def _network_of(pid: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _model() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
