"""The site file, ``torchmn.toml``: settings that all jobs of a site have in common.

Keys at the top level apply to all schedulers; those in ``[pbs]``, ``[slurm]`` and
``[grid_engine]`` apply to one and take precedence.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmn.errors import TorchmnError, UsageError
from torchmn.submit.choose import NAMES, raise_if_unknown
from torchmn.submit.settings import Settings, settings_from_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT_FILE = "torchmn.toml"
USER_FILE = ".config/torchmn/site.toml"


@dataclass(frozen=True, kw_only=True)
class Site:
    """The content of a site file; ``path`` is ``None`` where there is none."""

    path: Path | None = None
    scheduler: str | None = None
    defaults: Settings = field(default_factory=Settings)
    per_scheduler: Mapping[str, Settings] = field(default_factory=dict)

    def settings_for(self, scheduler: str) -> Settings:
        """The settings of jobs of this scheduler."""
        return self.per_scheduler.get(scheduler, Settings()).merged_over(self.defaults)


def find_site(named: Path | None, *, folder: Path, home: Path) -> Path | None:
    """The file that was named, else the one in ``folder`` or ``home``, else ``None``."""
    if named is not None:
        return named
    candidates = (folder / PROJECT_FILE, home / USER_FILE)
    return next((path for path in candidates if path.is_file()), None)


def read_site(path: Path | None) -> Site:
    """Read a site file. Raises UsageError, UnknownNameError: file, table or key is wrong."""
    if path is None:
        return Site()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"The site file {path} cannot be read ({error.strerror}): name another with --site."
        ) from None
    except (ValueError, RecursionError) as error:  # TOML's own errors, no UTF-8, too deep
        raise UsageError(f"The site file {path} is not valid TOML: {error}.") from None
    scheduler = table.pop("scheduler", None)
    if scheduler is not None:
        raise_if_unknown(scheduler, where=f" in {path}:")
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
