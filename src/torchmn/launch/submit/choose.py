"""Which scheduler takes the job: those that are here are facts, the choice follows from them."""

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


def installed_schedulers(path: str | None) -> tuple[str, ...]:
    """The names of the schedulers whose submit command is on this PATH. Local.

    Two that share a command are told apart by a command that only one of them has; a site with
    neither sign might have either.
    """

    def is_here(command: str) -> bool:
        return shutil.which(command, path=path) is not None

    candidates = [s for s in SCHEDULERS.values() if is_here(s.submit_command[0])]
    return tuple(
        s.name
        for s in candidates
        if is_here(s.sign)
        or not any(
            is_here(other.sign)
            for other in candidates
            if other.submit_command[0] == s.submit_command[0]
        )
    )


def choose_scheduler(wanted: str | None, installed: Sequence[str]) -> Scheduler:
    """The scheduler that was asked for, else the only one that is here.

    Raises UnknownNameError, UsageError: none is here. Raises UnsupportedError: several are here.
    """
    if wanted is not None:
        if wanted not in SCHEDULERS:
            raise UnknownNameError("scheduler", wanted, SCHEDULERS)
        return SCHEDULERS[wanted]
    known = "|".join(SCHEDULERS)
    if not installed:
        raise UsageError(
            "No scheduler was found: neither qsub nor sbatch is on the PATH. Do this on a login "
            f"node of the cluster, or make a script for one elsewhere: --scheduler {known} "
            "--dry-run."
        )
    if len(installed) > 1:
        names = " and ".join(
            f"{SCHEDULERS[name].title} ({SCHEDULERS[name].submit_command[0]})" for name in installed
        )
        raise UnsupportedError(
            f"{names} might all take the job: say which one is meant with --scheduler "
            f"{'|'.join(installed)}."
        )
    return SCHEDULERS[installed[0]]


def raise_if_no_command(scheduler: Scheduler, path: str | None) -> None:
    """Refuse to submit where the scheduler's command is missing. Raises UnsupportedError."""
    command = scheduler.submit_command[0]
    if shutil.which(command, path=path) is None:
        raise UnsupportedError(
            f"A job for {scheduler.title} is submitted with {command}, which is not on the PATH: "
            "do this on a login node of the cluster, or only make the script with --dry-run."
        )
