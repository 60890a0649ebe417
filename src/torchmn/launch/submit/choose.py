"""Choose the scheduler for a job from those that are installed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from torchmn.errors import UnknownNameError, UnsupportedError, UsageError
from torchmn.launch.submit.grid_engine import GridEngine
from torchmn.launch.submit.pbs import PBS
from torchmn.launch.submit.scheduler import Scheduler
from torchmn.launch.submit.slurm import Slurm

SCHEDULERS: dict[str, Scheduler] = {
    scheduler.name: scheduler for scheduler in (PBS(), Slurm(), GridEngine())
}
"""Those that take a job script."""
KUBERNETES = "kubernetes"
"""Takes a manifest instead (`torchmn.launch.submit.kubernetes`). Where other schedulers are
installed, it must be requested: a machine with kubectl is not a part of the cluster."""
NAMES = (*SCHEDULERS, KUBERNETES)


def installed_schedulers(path: str | None) -> tuple[str, ...]:
    """The names of the schedulers whose submit command is on this PATH. Local.

    Two that share a command are distinguished by a command that only one of them has; where neither
    has it, both are returned. Kubernetes is where there is kubectl and no other scheduler.
    """

    def is_here(command: str) -> bool:
        return shutil.which(command, path=path) is not None

    candidates = [s for s in SCHEDULERS.values() if is_here(s.submit_command[0])]
    found = tuple(
        s.name
        for s in candidates
        if is_here(s.probe_command)
        or not any(
            is_here(other.probe_command)
            for other in candidates
            if other.submit_command[0] == s.submit_command[0]
        )
    )
    return found or ((KUBERNETES,) if is_here("kubectl") else ())


def choose_scheduler(wanted: str | None, installed: Sequence[str]) -> Scheduler:
    """The scheduler that was requested, else the only one that is installed.

    Raises UnknownNameError, UsageError: none is installed, or UnsupportedError: several are.
    """
    if wanted is not None:
        if wanted not in SCHEDULERS:
            raise UnknownNameError("scheduler", wanted, NAMES)
        return SCHEDULERS[wanted]
    known = "|".join(NAMES)
    if not installed:
        raise UsageError(
            "No scheduler was found: neither qsub nor sbatch nor kubectl is on the PATH. Run this "
            "on a login node of the cluster, or only write the script: --scheduler "
            f"{known} --dry-run."
        )
    if len(installed) > 1:
        names = " and ".join(
            f"{SCHEDULERS[name].title} ({SCHEDULERS[name].submit_command[0]})" for name in installed
        )
        raise UnsupportedError(
            f"{names} are installed: choose one with --scheduler {'|'.join(installed)}."
        )
    return SCHEDULERS[installed[0]]


def raise_if_no_command(scheduler: Scheduler, path: str | None) -> None:
    """Raise UnsupportedError if the scheduler's command is not installed."""
    command = scheduler.submit_command[0]
    if shutil.which(command, path=path) is None:
        raise UnsupportedError(
            f"A job for {scheduler.title} is submitted with {command}, which is not on the PATH: "
            "run this on a login node of the cluster, or only write the script with --dry-run."
        )
