"""Choose the scheduler for a job from those that are installed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from torchmn.errors import UnknownNameError, UnsupportedError, UsageError
from torchmn.submit.grid_engine import GridEngine
from torchmn.submit.pbs import PBS
from torchmn.submit.scheduler import Scheduler
from torchmn.submit.slurm import Slurm

SCHEDULERS: dict[str, Scheduler] = {
    scheduler.name: scheduler for scheduler in (PBS(), Slurm(), GridEngine())
}
NAMES = tuple(SCHEDULERS)
NO_KUBERNETES = (
    "torchmn writes no manifests for Kubernetes: docs/how-to/kubernetes.md has one to copy, which "
    "starts the ranks with torchrun."
)


def installed_schedulers(path: str | None) -> tuple[str, ...]:
    """The names of the schedulers whose submit command is on this PATH. Local.

    Two that share a command are distinguished by a command that only one of them has; where neither
    has it, both are returned.
    """

    def is_here(command: str) -> bool:
        return shutil.which(command, path=path) is not None

    candidates = [s for s in SCHEDULERS.values() if is_here(s.submit_command[0])]
    return tuple(
        s.name
        for s in candidates
        if is_here(s.probe_command)
        or not any(
            is_here(other.probe_command)
            for other in candidates
            if other.submit_command[0] == s.submit_command[0]
        )
    )


def raise_if_unknown(name: str, *others: str, where: str = "") -> None:
    """Raise UsageError for Kubernetes, UnknownNameError for another name that is no scheduler's.

    ``others`` are further names that are accepted; ``where`` is the file that has the name.
    """
    if name == "kubernetes":
        raise UsageError(NO_KUBERNETES)
    if name not in (*NAMES, *others):
        raise UnknownNameError(f"scheduler{where}", name, (*NAMES, *others))


def choose_scheduler(wanted: str | None, installed: Sequence[str]) -> Scheduler:
    """The scheduler that was requested, else the only one that is installed.

    Raises UnknownNameError, UsageError: none is installed, or UnsupportedError: several are.
    """
    if wanted is not None:
        raise_if_unknown(wanted)
        return SCHEDULERS[wanted]
    known = "|".join(NAMES)
    if not installed:
        raise UsageError(
            "No scheduler was found: neither qsub nor sbatch is on the PATH. Run this on a "
            "login node of the cluster, or only write the script: --scheduler "
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
