"""The environment of launchers and agents; `rank_environment` makes that of a script from it."""

from __future__ import annotations

from collections.abc import Mapping

from torchmn.environment_variables import (
    BACKEND_VARIABLE,
    SECRET_VARIABLE,
    SUPERVISOR_VARIABLE,
    TRANSPORT_VARIABLE,
)
from torchmn.launch.job import Job
from torchmn.topology.launcher_env import LAUNCHERS

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
    transport and backend. ``supervisor`` is the address that agents connect to.
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
    }


def rank_variables(job: Job, inter_rank: int, intra_rank: int) -> dict[str, str]:
    """The variables of one rank, as torchrun sets them."""
    ranks = job.ranks_on(inter_rank)
    return {
        "RANK": str(ranks[intra_rank]),
        "WORLD_SIZE": str(job.num_ranks),
        "LOCAL_RANK": str(intra_rank),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GROUP_RANK": str(inter_rank),
        "GROUP_WORLD_SIZE": str(len(job.hosts)),
    }
