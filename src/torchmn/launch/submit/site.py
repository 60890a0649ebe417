"""The file of a site: what all its jobs have in common, in TOML.

Keys at the top are for every scheduler, those in ``[pbs]``, ``[slurm]`` and ``[grid_engine]`` for
one, and count more.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from torchmn.errors import UnknownNameError, UsageError
from torchmn.launch.submit.choose import SCHEDULERS
from torchmn.launch.submit.settings import Export, Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = "torchmn.toml"
AT_HOME = ".config/torchmn/site.toml"

_KEYS = (
    *("queue", "group", "walltime", "threads", "chunk", "parallel_environment", "activate"),
    *("log_dir", "join_output", "modules", "directives", "exports"),
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a site's file says; ``path`` is ``None`` where there is none."""

    path: Path | None = None
    scheduler: str | None = None
    general: Settings = field(default_factory=Settings)
    special: Mapping[str, Settings] = field(default_factory=dict)

    def settings_for(self, scheduler: str) -> Settings:
        """What holds for jobs of this scheduler."""
        return self.special.get(scheduler, Settings()).over(self.general)


def find_site(named: Path | None, *, folder: Path, home: Path) -> Path | None:
    """The file that was named, else the one in ``folder``, else the one at home, else ``None``."""
    if named is not None:
        return named
    return next((path for path in (folder / HERE, home / AT_HOME) if path.is_file()), None)


def read_site(path: Path | None) -> Site:
    """Read a site's file. Raises UsageError with the file and the key: it is missing or wrong."""
    if path is None:
        return Site()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"The site's file {path} cannot be read ({error.strerror}): name another with --site."
        ) from None
    except (ValueError, RecursionError) as error:  # TOML's own errors, no UTF-8, too deep
        raise UsageError(f"The site's file {path} is no TOML: {error}. Correct it.") from None
    scheduler = table.pop("scheduler", None)
    if scheduler is not None and scheduler not in tuple(SCHEDULERS):
        raise UnknownNameError(f"scheduler in {path}:", scheduler, SCHEDULERS)
    special = {}
    for name in [name for name in SCHEDULERS if name in table]:
        own = table.pop(name)
        if not _is_table(own):
            raise UsageError(f"{path}: {name} is a table, got {own!r}: write [{name}].")
        special[name] = _settings(own, f"[{name}] of {path}", _KEYS)
    return Site(
        path=path,
        scheduler=scheduler,
        general=_settings(table, str(path), (*_KEYS, "scheduler", *SCHEDULERS)),
        special=special,
    )


def _settings(table: Mapping[str, object], source: str, known: tuple[str, ...]) -> Settings:
    for key in table:
        if key not in known:
            raise UnknownNameError(f"key in {source}:", key, known)
    try:
        return Settings(
            queue=_text(table, "queue"),
            group=_text(table, "group"),
            walltime=_text(table, "walltime"),
            threads=_whole_number(table, "threads"),
            chunk=_text(table, "chunk"),
            parallel_environment=_text(table, "parallel_environment"),
            activate=_text(table, "activate"),
            log_dir=_text(table, "log_dir"),
            join_output=_truth(table, "join_output"),
            modules=_list(table, "modules"),
            directives=_list(table, "directives"),
            exports=_exports(table),
        )
    except UsageError as error:
        raise UsageError(f"In {source}: {error}") from None


def _text(table: Mapping[str, object], key: str) -> str | None:
    value = table.get(key)
    if value is None or isinstance(value, str):
        return value
    raise _wrong(key, "text in quotes", value)


def _whole_number(table: Mapping[str, object], key: str) -> int | None:
    value = table.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise _wrong(key, "a whole number", value)


def _truth(table: Mapping[str, object], key: str) -> bool | None:
    value = table.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise _wrong(key, "true or false", value)


def _list(table: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise _wrong(key, 'a list of texts, as in ["first", "second"]', value)


def _exports(table: Mapping[str, object]) -> tuple[Export, ...]:
    """Numbers are taken too: ``NCCL_SHM_DISABLE = 1`` is what people write."""
    value = table.get("exports", {})
    if _is_table(value) and all(
        isinstance(item, (str, int, float)) and not isinstance(item, bool)
        for item in value.values()
    ):
        return tuple((name, str(item)) for name, item in value.items())
    raise _wrong("exports", 'a table, as in { NCCL_SHM_DISABLE = "1" }', value)


def _is_table(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _wrong(key: str, rule: str, value: object) -> UsageError:
    return UsageError(f"{key} is {rule}, got {value!r}.")
