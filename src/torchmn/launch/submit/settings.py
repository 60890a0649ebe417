"""What is the same for many jobs: queue, group, modules, environment. From a site's file or given.

Everything here ends in a line of a shell script, so every value is checked: no value may become a
second line, and none a second word where a scheduler reads one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from torchmn.control.authenticated_listener import SECRET_VARIABLE
from torchmn.errors import UsageError

Export = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job gets besides its size and its script; ``None`` or empty where nobody said.

    ``chunk`` is what PBS adds to every node of its select, such as ``ncpus=36:ngpus=2``;
    ``parallel_environment`` is what Grid Engine needs for more than one slot. ``activate`` is the
    folder of a virtual environment or the name of a conda environment. Raises UsageError.
    """

    queue: str | None = None
    group: str | None = None
    walltime: str | None = None
    threads: int | None = None
    chunk: str | None = None
    parallel_environment: str | None = None
    activate: str | None = None
    log_dir: str | None = None
    join_output: bool | None = None
    modules: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    exports: tuple[Export, ...] = ()

    def __post_init__(self) -> None:
        for name in ("queue", "group", "chunk", "parallel_environment"):
            _raise_if_not_one_word(name.replace("_", " "), getattr(self, name))
        _raise_if_no_walltime(self.walltime)
        _raise_if_unfit_for_directives("log folder", self.log_dir)
        if self.threads is not None and self.threads < 1:
            raise UsageError(
                f"threads is the number of threads of each worker: at least 1, got {self.threads}."
            )
        for line in (*self.modules, *self.directives, self.activate or "-"):
            if not line.strip() or len(line.splitlines()) != 1:
                raise UsageError(
                    f"A module, a directive and an environment are one line each, got {line!r}."
                )
        for name, _ in self.exports:
            if name == SECRET_VARIABLE:
                raise UsageError(
                    f"{name} would stand in the job's file for others to read: leave it out, "
                    "`torchmn run` gives every job a new secret."
                )
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise UsageError(
                    f"{name!r} is no name of a variable: letters, digits and _, no digit first."
                )

    def over(self, weaker: Settings) -> Settings:
        """These settings, and those of ``weaker`` where these say nothing.

        Modules and directives of both stand in the script, these last; of two exports of one name
        this one counts.
        """
        own = {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None and value != ()
        }
        return replace(
            weaker,
            **own
            | {
                "modules": (*weaker.modules, *self.modules),
                "directives": (*weaker.directives, *self.directives),
                "exports": tuple(dict((*weaker.exports, *self.exports)).items()),
            },
        )


def parse_export(text: str) -> Export:
    """Name and value of an ``--export``. Raises UsageError.

    >>> parse_export("NCCL_SHM_DISABLE=1")
    ('NCCL_SHM_DISABLE', '1')
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(
            f"--export is NAME=VALUE, got {text!r}: write --export {name or 'NAME'}=VALUE."
        )
    return name, value


def _raise_if_not_one_word(what: str, text: str | None) -> None:
    if text is not None and not re.fullmatch(r"[^\s#]+", text):
        raise UsageError(f"A {what} is one word, got {text!r}: write it without blanks.")


def _raise_if_no_walltime(text: str | None) -> None:
    if text is None:
        return
    if not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", text) or not re.search(r"[1-9]", text):
        raise UsageError(
            f"The walltime is hours:minutes:seconds and more than nothing, got {text!r}: for ten "
            "minutes write 00:10:00."
        )


def _raise_if_unfit_for_directives(what: str, text: str | None) -> None:
    """Directives know no quotes, and each scheduler gives ``%``, ``$`` or ``:`` a meaning."""
    if text is not None and not re.fullmatch(r"[\w./+=@-]+", text):
        raise UsageError(
            f"The {what} stands in a directive, where schedulers take letters, digits and "
            f"_ . / + = @ - only: got {text!r}. Choose another one."
        )
