"""The cores and environment variables of agents and ranks, under any launcher."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import NoReturn

from torchmn.cluster.cpus import (
    CpuAssignment,
    Processors,
    assign_cpus,
    available_processors,
    cores_near_gpu,
)
from torchmn.cluster.environment_variables import (
    BACKEND_VARIABLE,
    HOSTS_VARIABLE,
    JOB_VARIABLE,
    PROGRESS_VARIABLE,
    RECORD_VARIABLE,
    ROUND_VARIABLE,
    SECRET_VARIABLE,
    SUPERVISOR_VARIABLE,
    TRANSPORT_VARIABLE,
)
from torchmn.cluster.gpus import gpu_localities, memory_nodes, shared_gpu_variables
from torchmn.cluster.launcher_env import LAUNCHERS, LauncherInfo
from torchmn.cluster.network import Route
from torchmn.cluster.units import grouped
from torchmn.control.rank_claim import claimed_by
from torchmn.run.job import Job

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_RENDEZVOUS = frozenset({"MASTER_ADDR", "MASTER_PORT"})
# For glibc: what a training step frees is used again by the next one. By default the end of the
# heap goes back to the system, and each step of VGG-16 on a CPU causes some 25,000 page faults.
_KEPT_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def run_as_rank(argv: Sequence[str], env: Mapping[str, str], place: LauncherInfo) -> NoReturn:
    """Replace this process, which another launcher started as a rank, by the script.

    The script is bound to its share of the cores. MPI launchers and torchrun may have bound the
    process already: the cores that the launcher itself may use are divided again, so that the
    binding is the same under all of them. Slurm's binding is kept, since only Slurm knows which
    cores of the node belong to the job.

    >>> import multiprocessing, os, sys
    >>> from torchmn.run.rank_environment import run_as_rank
    >>> from torchmn.cluster.launcher_env import LauncherInfo
    >>> place = LauncherInfo(launcher="Slurm", kind="scheduler", rank=0, known_size=1)
    >>> script = [sys.executable, "-c", "import os; assert 'OMP_NUM_THREADS' in os.environ"]
    >>> process = multiprocessing.get_context("spawn").Process(  # which becomes the script
    ...     target=run_as_rank, args=(script, dict(os.environ), place)
    ... )
    >>> process.start()
    >>> process.join()
    >>> process.exitcode
    0
    """
    own, around = available_processors(), available_processors(pid=os.getppid())
    is_bound = set(own.logical) < set(around.logical)
    if not (is_bound and place.kind == "scheduler"):
        bind_cores(place, env, around if is_bound else own)
    share = assign_cpus(available_processors(), intra_rank=0, intra_size=1)
    os.execvpe(argv[0], list(argv), script_environment(env, share, {}, None))


def bind_cores(
    place: LauncherInfo, env: Mapping[str, str], processors: Processors
) -> tuple[CpuAssignment, str]:
    """Bind this process, and so its children, to the rank's share of the node's processors.

    Returns the share, and a description of the GPU or memory nodes near it. By the system's default
    policy, memory is then allocated on the NUMA node of these cores.
    """
    share, beside = cores_near_gpu(
        processors,
        gpu_localities(env),
        intra_rank=0 if place.intra_rank is None else place.intra_rank,
        intra_size=1 if place.intra_size is None else place.intra_size,
    )
    os.sched_setaffinity(0, share.cores)
    nodes = memory_nodes(share.cores)
    words = [f"beside GPU {place.intra_rank} ({beside.bus})"] if beside else []
    words += [f"memory node {', '.join(map(str, nodes))}"] if nodes else []
    return share, ", ".join(words)


def script_environment(
    env: Mapping[str, str], share: CpuAssignment, ordered: Mapping[str, str], route: Route | None
) -> dict[str, str]:
    """Return the script's environment, with one thread per core unless the user chose a number.

    ``ordered`` comes from the supervisor and applies where the launcher has set nothing; only
    MASTER_ADDR and MASTER_PORT are always the supervisor's.
    gloo and NCCL use the network interface of ``route``, which is known to reach the other hosts.
    Unless PYTHONHASHSEED is a number it becomes 0, so that sets have the same order on all ranks.
    """
    threads = env.get("OMP_NUM_THREADS") or str(share.num_threads)
    interfaces = {} if route is None else dict.fromkeys(_INTERFACES, route.interface)
    chosen = {
        **_heap_variables(env),
        **ordered,
        **shared_gpu_variables(env, ordered.get("RANK", "0")),
        **interfaces,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",  # its output is a pipe: lines are to arrive as they are written
    }
    left = {SUPERVISOR_VARIABLE, *(_RENDEZVOUS & ordered.keys())}
    given = {name: text for name, text in env.items() if name not in left}
    if not given.get("PYTHONHASHSEED", "").isdigit():  # "random", too, is another on each rank
        given["PYTHONHASHSEED"] = "0"
    return {**chosen, **given, "OMP_NUM_THREADS": threads}


def _heap_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return `_KEPT_HEAP`, or nothing if the user has configured malloc or another allocator."""
    is_chosen = any(
        name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in env
    )
    return {} if is_chosen else _KEPT_HEAP


_DROPPED_NAMES = frozenset(
    name
    for row in LAUNCHERS
    if row.kind != "scheduler"  # an mpirun may run inside a step of Slurm
    for names in astuple(row)[2:]  # after the launcher and its kind
    for name in names
)
# Variables with these names and prefixes make a process believe that it is itself a rank, or a job
# that a rank starts that it is to have the hosts of this one (PET_, of torchrun's options).
_DROPPED_PREFIXES = (
    *("OMPI_ARGV", "OMPI_COMM", "OMPI_FILE", "OMPI_NUM", "OMPI_TOOL", "OMPI_UNIVERSE"),
    *("OMPI_VERSION", "OMPI_WORLD", "PMIX_", "PRTE_", "PMI_", "HYDI_", "TORCHELASTIC_", "PET_"),
)
# What a job that a rank starts must not inherit from the rank's.
_OF_OUTER_JOB = frozenset(
    {HOSTS_VARIABLE, JOB_VARIABLE, PROGRESS_VARIABLE, RECORD_VARIABLE, ROUND_VARIABLE}
    | {"SLURM_STEP_ID", "SLURM_STEPID"}
)


def worker_environment(job: Job, env: Mapping[str, str], *, supervisor: str = "") -> dict[str, str]:
    """Return the environment of all agents of a job, whatever starts them.

    It is ``env`` as `without_launcher` returns it, with the job's secret, transport and backend.
    ``supervisor`` is the address that agents connect to. The names of two hosts suffice for every
    agent to find its route to another host.
    """
    return {
        **without_launcher(env),
        SECRET_VARIABLE: job.secret,
        TRANSPORT_VARIABLE: "mpi" if job.backend == "mpi" else "torch",
        BACKEND_VARIABLE: job.backend,
        **({SUPERVISOR_VARIABLE: supervisor} if supervisor else {}),
        **({HOSTS_VARIABLE: ",".join(deciding_hosts(job))} if job.has_other_hosts else {}),
    }


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` without the variables that an outer launcher of a single rank left in it."""
    dropped = _DROPPED_NAMES if claimed_by(env) is None else _DROPPED_NAMES | _OF_OUTER_JOB
    return {
        name: text
        for name, text in env.items()
        if "_MCA_" in name or not (name in dropped or name.startswith(_DROPPED_PREFIXES))
    }


def deciding_hosts(job: Job) -> list[str]:
    """Return the first two hosts; each host chooses its address and interface towards one of them.

    The host of `torchmn run` does not serve for this: it may be a login node on another network.
    """
    return [host.name for host in job.hosts[:2]]


def rank_variables(slots: Sequence[int], inter_rank: int, intra_rank: int) -> dict[str, str]:
    """Return the variables by which an agent knows its rank, with the names of torchrun.

    ``slots`` has the number of ranks on each host.
    """
    return {
        "RANK": str(sum(slots[:inter_rank]) + intra_rank),
        "WORLD_SIZE": str(sum(slots)),
        "LOCAL_RANK": str(intra_rank),
        "LOCAL_WORLD_SIZE": str(slots[inter_rank]),
        "GROUP_RANK": str(inter_rank),
        "GROUP_WORLD_SIZE": str(len(slots)),
    }


def torchrun_variables(hosts: Sequence[str]) -> list[dict[str, str]]:
    """Return for each rank the variables that torchrun sets, from the host name of each rank.

    GROUP_WORLD_SIZE is left out: it marks a world of torchrun's own agents.
    """
    found: dict[int, dict[str, str]] = {}
    groups = grouped((host, rank) for rank, host in enumerate(hosts))
    slots = [len(ranks) for ranks in groups.values()]
    for inter_rank, ranks in enumerate(groups.values()):
        for intra_rank, rank in enumerate(ranks):  # whose hosts need not be in order
            found[rank] = {
                **rank_variables(slots, inter_rank, intra_rank),
                "RANK": str(rank),
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                # by which other libraries, such as Lightning, recognize torchrun
                "TORCHELASTIC_RUN_ID": "torchmn",
            }
            del found[rank]["GROUP_WORLD_SIZE"]
    return [found[rank] for rank in range(len(hosts))]
