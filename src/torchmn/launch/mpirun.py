"""Start the agents through mpirun, so that an MPI program finds its world."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torchmn.errors import LaunchError
from torchmn.launch.job import Command, Job, worker_command
from torchmn.topology.environment import LAUNCHERS

Flavour = Literal["Open MPI", "Hydra"]

_NAMES_LEFT = frozenset(
    name
    for row in LAUNCHERS
    if row.kind != "scheduler"  # an mpirun may stand inside a step of Slurm
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
_BEGINNINGS_LEFT = (
    *("OMPI_ARGV", "OMPI_COMM", "OMPI_FILE", "OMPI_NUM", "OMPI_TOOL", "OMPI_UNIVERSE"),
    *("OMPI_VERSION", "OMPI_WORLD", "PMIX_", "PRTE_", "PMI_", "HYDI_", "TORCHELASTIC_"),
)
"""Variables with these names and beginnings make a process believe that it is itself a rank."""


def flavour_of(mpirun: str) -> Flavour:
    """Which mpirun this is, by its own words. Raises LaunchError: none we know, or it is broken."""
    try:
        answer = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{mpirun} does not answer --version: {error}. Use --backend gloo."
        ) from None
    words = answer.stdout + answer.stderr
    if "Open MPI" in words or "OpenRTE" in words:
        return "Open MPI"
    if "HYDRA" in words or "Intel(R) MPI" in words:
        return "Hydra"
    first = words.strip().splitlines()[:1]
    raise LaunchError(
        f"{mpirun} is neither Open MPI nor MPICH or Intel MPI (it says {first}). "
        "Start the script with it directly, or use --backend gloo."
    )


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` without what an outer launcher of one rank left in it; settings of the user stay."""
    return {
        name: text
        for name, text in env.items()
        if "_MCA_" in name or not (name in _NAMES_LEFT or name.startswith(_BEGINNINGS_LEFT))
    }


def command(
    job: Job,
    env: Mapping[str, str],
    *,
    mpirun: str,
    flavour: Flavour,
    num_cores: int,
    is_root: bool,
) -> Command:
    """One mpirun for all ranks of this machine. The agents bind themselves to their cores."""
    count = str(job.num_ranks)
    if flavour == "Hydra":
        options = ["-launcher", "fork", "-rmk", "user", "-bind-to", "none", "-n", count]
    else:
        options = ["--host", f"localhost:{count}", "--bind-to", "none", "-n", count]
        if is_root:
            options.insert(0, "--allow-run-as-root")
        if job.num_ranks > num_cores:
            options += ["--mca", "mpi_yield_when_idle", "1"]  # spinning would starve the others
        if Path(mpirun).parent == Path(sys.executable).parent:
            # Open MPI's wheel looks for fabrics through libfabric, which takes more than a second
            # of MPI_Init and finds nothing that one machine needs. The user's own choice stays.
            env = {"OMPI_MCA_btl": "^ofi", **env}
    return Command((mpirun, *options, *worker_command()), env, name="mpirun")
