"""Choose the communication backend from facts about this machine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from torchmn.cluster.gpus import count_gpus
from torchmn.cluster.units import counted
from torchmn.errors import UnknownNameError, UnsupportedError
from torchmn.run.job import Backend

BACKENDS = ("auto", "gloo", "nccl", "mpi")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the choice of a backend depends on.

    Example:
        >>> Machine(num_gpus=2).missing_for_mpi
        'an mpirun and mpi4py'
    """

    num_gpus: int = 0
    mpirun: str | None = None
    has_mpi4py: bool = False

    @property
    def missing_for_mpi(self) -> str:
        """What is missing for MPI here; empty if nothing."""
        lacking = [
            *([] if self.mpirun else ["an mpirun"]),
            *([] if self.has_mpi4py else ["mpi4py"]),
        ]
        return " and ".join(lacking)


def this_machine(env: Mapping[str, str]) -> Machine:
    """The facts of this machine, without importing torch or MPI. Local.

    Example:
        >>> import os
        >>> this_machine(os.environ).num_gpus >= 0
        True
    """
    return Machine(
        num_gpus=count_gpus(env),
        mpirun=find_mpirun(env),
        has_mpi4py=PathFinder.find_spec("mpi4py") is not None,
    )


def find_mpirun(env: Mapping[str, str]) -> str | None:
    """The mpirun beside this Python (the wheel's, which mpi4py loads), else the one on the path."""
    beside = Path(sys.executable).parent / "mpirun"
    if beside.is_file():
        return str(beside)
    return shutil.which("mpirun", path=env.get("PATH")) or shutil.which(
        "mpiexec", path=env.get("PATH")
    )


def choose_backend(
    wanted: str, machine: Machine, num_ranks: int, *, mpi_problem: str = ""
) -> tuple[Backend, str]:
    """The backend and why.

    ``auto`` is nccl with a GPU for every rank, else mpi where it is installed (inside a machine it
    is faster than gloo), else gloo. ``mpi_problem`` is why the mpirun of this machine cannot reach
    the hosts of the job.

    Raises UnknownNameError: no such backend. Raises UnsupportedError: it cannot work here.

    >>> from torchmn.run.backend import choose_backend, this_machine
    >>> backend, why = choose_backend("gloo", this_machine({}), 2)
    >>> backend
    'gloo'
    """
    if wanted not in BACKENDS:
        raise UnknownNameError("backend", wanted, BACKENDS)
    if wanted == "gloo":
        return "gloo", "as requested"
    if wanted == "nccl":
        _check_num_gpus(machine, num_ranks)
        return "nccl", "as requested"
    if wanted == "mpi":
        if machine.missing_for_mpi:
            raise UnsupportedError(
                f"--backend mpi needs {machine.missing_for_mpi}, which this Python "
                f"({sys.executable}) does not find: install torchmn[mpi], or use --backend gloo."
            )
        if mpi_problem:
            raise UnsupportedError(f"--backend mpi: {mpi_problem}. Or use --backend gloo.")
        return "mpi", "as requested"
    if machine.num_gpus >= num_ranks:
        return "nccl", "a GPU for every rank"
    why = "no GPU" if machine.num_gpus == 0 else f"fewer GPUs ({machine.num_gpus}) than ranks"
    if machine.missing_for_mpi:
        return "gloo", f"{why}, and {machine.missing_for_mpi} missing for MPI"
    if mpi_problem:
        return "gloo", f"{why}, and no MPI: {mpi_problem}"
    return "mpi", why


def _check_num_gpus(machine: Machine, num_ranks: int) -> None:
    if machine.num_gpus >= num_ranks:
        return
    found = "no CUDA GPU" if machine.num_gpus == 0 else counted(machine.num_gpus, "CUDA GPU")
    cure = f"-n {machine.num_gpus} or " if machine.num_gpus else ""
    raise UnsupportedError(
        f"--backend nccl needs a GPU for each of the {counted(num_ranks, 'rank')} and this "
        f"machine has {found}: use {cure}--backend gloo or mpi, and check CUDA_VISIBLE_DEVICES."
    )
