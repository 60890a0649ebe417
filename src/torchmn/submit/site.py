"""The schedulers of a site, and its file, ``torchmn.toml``: settings that all its jobs share.

Keys at the top level apply to all schedulers; those in ``[pbs]``, ``[slurm]`` and
``[grid_engine]`` apply to one and take precedence.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from torchmn.base.errors import TorchmnError, UnknownNameError, UnsupportedError, UsageError
from torchmn.submit.grid_engine import GridEngine
from torchmn.submit.pbs import PBS
from torchmn.submit.scheduler import Scheduler
from torchmn.submit.settings import Settings, settings_from_table
from torchmn.submit.slurm import Slurm

SCHEDULERS: dict[str, Scheduler] = {
    scheduler.name: scheduler for scheduler in (PBS(), Slurm(), GridEngine())
}
NAMES = tuple(SCHEDULERS)


def installed_schedulers(path: str | None) -> tuple[str, ...]:
    """Return the names of the schedulers whose submit command is on this PATH. Local.

    Two with the same command are distinguished by a command that only one of them has; if that is
    missing, both are returned.
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


def _raise_if_unknown(name: str, *, where: str = "") -> None:
    """Raise UsageError for Kubernetes, UnknownNameError for any other unknown scheduler.

    ``where`` is the file that has the name.
    """
    if name == "kubernetes":
        raise UsageError(
            "torchmn writes no manifests for Kubernetes: docs/how-to/kubernetes.md has one to "
            "copy, which starts the ranks with torchrun."
        )
    if name not in NAMES:
        raise UnknownNameError(f"scheduler{where}", name, NAMES)


def choose_scheduler(wanted: str | None, installed: Sequence[str]) -> Scheduler:
    """Return the requested scheduler, or by default the only one that is installed.

    Raises UnknownNameError, UsageError: none is installed, or UnsupportedError: several are.
    """
    if wanted is not None:
        _raise_if_unknown(wanted)
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


PROJECT_FILE = "torchmn.toml"
USER_FILE = ".config/torchmn/site.toml"


@dataclass(frozen=True, kw_only=True)
class Site:
    """Content of a site file; ``path`` is None if there is no file."""

    path: Path | None = None
    scheduler: str | None = None
    defaults: Settings = field(default_factory=Settings)
    per_scheduler: Mapping[str, Settings] = field(default_factory=dict)

    def settings_for(self, scheduler: str) -> Settings:
        """Return the settings for jobs of this scheduler."""
        return self.per_scheduler.get(scheduler, Settings()).merged_over(self.defaults)


def find_site(named: Path | None, *, folder: Path, home: Path) -> Path | None:
    """Return the named site file, else the one in ``folder`` or ``home``, else None."""
    if named is not None:
        return named
    candidates = (folder / PROJECT_FILE, home / USER_FILE)
    # Not `Path.is_file`, which raises where the home is not readable, as under sudo -u.
    return next((path for path in candidates if os.path.isfile(path)), None)


def read_site(path: Path | None) -> Site:
    """Read a site file. Raises UsageError, UnknownNameError: file, table or key is wrong."""
    if path is None:
        return Site()
    try:
        table = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"The site file {path} cannot be read ({error.strerror}): name another with --site."
        ) from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, too deep
        raise UsageError(f"The site file {path} is not valid TOML: {error}.") from None
    scheduler = table.pop("scheduler", None)
    if scheduler is not None:
        _raise_if_unknown(scheduler, where=f" in {path}:")
    own = {name: table.pop(name) for name in NAMES if name in table}
    for name, value in own.items():
        if not isinstance(value, dict):
            raise UsageError(f"{path}: {name} must be a table, got {value!r}: write [{name}].")
    return Site(
        path=path,
        scheduler=scheduler,
        defaults=_settings(table, str(path), ("scheduler", *(f"[{name}]" for name in NAMES))),
        per_scheduler={name: _settings(own[name], f"[{name}] of {path}") for name in own},
    )


def _settings(table: Mapping[str, object], source: str, others: Sequence[str] = ()) -> Settings:
    try:
        return settings_from_table(table, others=others)
    except TorchmnError as error:
        raise UsageError(f"In {source}: {error}") from None
