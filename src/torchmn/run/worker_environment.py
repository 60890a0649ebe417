"""The environment of launchers and agents; `rank_environment` makes that of a script from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torchmn.cluster.environment_variables import (
    BACKEND_VARIABLE,
    HOSTS_VARIABLE,
    SECRET_VARIABLE,
    SUPERVISOR_VARIABLE,
    TRANSPORT_VARIABLE,
)
from torchmn.cluster.launcher_env import LAUNCHERS
from torchmn.run.job import Job

_DROPPED_NAMES = frozenset(
    name
    for row in LAUNCHERS
    if row.kind != "scheduler"  # an mpirun may run inside a step of Slurm
    for names in (
        row.rank,
        row.size,
        row.intra_rank,
        row.intra_size,
        row.inter_rank,
        row.inter_size,
    )
    for name in names
)
_DROPPED_PREFIXES = (
    *("OMPI_ARGV", "OMPI_COMM", "OMPI_FILE", "OMPI_NUM", "OMPI_TOOL", "OMPI_UNIVERSE"),
    *("OMPI_VERSION", "OMPI_WORLD", "PMIX_", "PRTE_", "PMI_", "HYDI_", "TORCHELASTIC_"),
)
"""Variables with these names and prefixes make a process believe that it is itself a rank."""


def worker_environment(job: Job, env: Mapping[str, str], *, supervisor: str = "") -> dict[str, str]:
    """The environment of all agents of a job, whatever starts them.

    ``env`` without what an outer launcher of a single rank left in it, and the job's secret,
    transport and backend. ``supervisor`` is the address that agents connect to. Of the hosts two
    names suffice for every agent to find the way to another one.
    """
    kept = {
        name: text
        for name, text in env.items()
        if "_MCA_" in name or not (name in _DROPPED_NAMES or name.startswith(_DROPPED_PREFIXES))
    }
    return {
        **kept,
        SECRET_VARIABLE: job.secret,
        TRANSPORT_VARIABLE: "mpi" if job.backend == "mpi" else "torch",
        BACKEND_VARIABLE: job.backend,
        **({SUPERVISOR_VARIABLE: supervisor} if supervisor else {}),
        **({HOSTS_VARIABLE: ",".join(deciding_hosts(job))} if job.has_other_hosts else {}),
    }


def deciding_hosts(job: Job) -> list[str]:
    """The hosts towards which the others choose their address and interface: the first two.

    Not the host of `torchmn run`, which may be a login node on a network of its own.
    """
    return [host.name for host in job.hosts[:2]]


def rank_variables(job: Job, inter_rank: int, intra_rank: int) -> dict[str, str]:
    """The variables by which an agent knows its rank, named as torchrun names them."""
    ranks = job.ranks_on(inter_rank)
    return {
        "RANK": str(ranks[intra_rank]),
        "WORLD_SIZE": str(job.num_ranks),
        "LOCAL_RANK": str(intra_rank),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GROUP_RANK": str(inter_rank),
        "GROUP_WORLD_SIZE": str(len(job.hosts)),
    }


def torchrun_variables(hosts: Sequence[str]) -> list[dict[str, str]]:
    """What torchrun sets for each rank, from the names of the ranks' hosts, for any launcher.

    Without GROUP_WORLD_SIZE, which marks a world of torchrun's own agents.
    """
    groups, sizes = list(dict.fromkeys(hosts)), Counter(hosts)
    started: Counter[str] = Counter()
    found = []
    for rank, host in enumerate(hosts):
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": len(hosts),
            "LOCAL_RANK": started[host],
            "LOCAL_WORLD_SIZE": sizes[host],
            "GROUP_RANK": groups.index(host),
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
        found.append({name: str(number) for name, number in numbers.items()})
        # by which other libraries, such as Lightning, recognize torchrun
        found[-1]["TORCHELASTIC_RUN_ID"] = "torchmn"
        started[host] += 1
    return found
