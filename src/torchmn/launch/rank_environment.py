"""The cores and the variables of a rank, whoever started it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torchmn.environment_variables import SUPERVISOR_VARIABLE
from torchmn.topology import (
    CpuAssignment,
    LauncherInfo,
    Processors,
    Route,
    assign_cpus,
    available_processors,
    cores_near_gpu,
    gpu_localities,
    memory_nodes,
)

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def run_as_rank(argv: Sequence[str], env: Mapping[str, str], place: LauncherInfo) -> NoReturn:
    """Become the script of a rank that another launcher has started, bound to its cores.

    A launcher may have bound it already, by a rule of its own. What MPI launchers and torchrun have
    themselves is divided anew, so that the binding is the same under all of them; Slurm's stays,
    since only Slurm knows which cores of the node are the job's.
    """
    own, around = available_processors(), available_processors(pid=os.getppid())
    is_bound = set(own.logical) < set(around.logical)
    if not (is_bound and place.kind == "scheduler"):
        take_share(place, env, around if is_bound else own)
    share = assign_cpus(available_processors(), intra_rank=0, intra_size=1)
    os.execvpe(argv[0], list(argv), script_environment(env, share, {}, None))


def take_share(
    place: LauncherInfo, env: Mapping[str, str], processors: Processors
) -> tuple[CpuAssignment, str]:
    """Bind this process, and so its children, to the rank's share of the node's processors.

    Also says in words what the share lies beside. Memory then comes from the node of these cores:
    that is the system's rule where nobody has set another.
    """
    share, beside = cores_near_gpu(
        processors,
        gpu_localities(env),
        intra_rank=0 if place.intra_rank is None else place.intra_rank,
        intra_size=1 if place.intra_size is None else place.intra_size,
    )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.cores)
    nodes = memory_nodes(share.cores)
    words = [f"beside GPU {place.intra_rank} ({beside.bus})"] if beside else []
    words += [f"memory node {', '.join(map(str, nodes))}"] if nodes else []
    return share, ", ".join(words)


def script_environment(
    env: Mapping[str, str], share: CpuAssignment, ordered: Mapping[str, str], route: Route | None
) -> dict[str, str]:
    """What the script sees: as many threads as it has cores unless the user chose a number.

    ``ordered`` is the supervisor's, which counts where the launcher has set nothing. gloo and NCCL
    use the interface of ``route``: it is known to connect us with the others.
    """
    threads = env.get("OMP_NUM_THREADS") or str(share.num_threads)
    interfaces = {} if route is None else dict.fromkeys(_INTERFACES, route.interface)
    chosen = {
        **ordered,
        **interfaces,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",  # its output is a pipe: lines should arrive when they are written
    }
    has_meeting_point = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    left = {SUPERVISOR_VARIABLE, *(() if has_meeting_point else ordered)}
    given = {name: text for name, text in env.items() if name not in left}
    return {**chosen, **given, "OMP_NUM_THREADS": threads}
