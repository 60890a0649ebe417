"""Variables that the user exports to all ranks: ``-x NAME=VALUE`` or ``-x NAME``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from torchmn.cluster.environment_variables import SECRET_VARIABLE
from torchmn.errors import UsageError


def parse_variable(text: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Name and value of one ``-x``; the value of a bare name is that in ``env``.

    Raises UsageError: there is no such variable, or it must not be exported.

    >>> parse_variable("NCCL_DEBUG=INFO", {}), parse_variable("HOME", {"HOME": "/root"})
    (('NCCL_DEBUG', 'INFO'), ('HOME', '/root'))
    """
    name, equals, value = text.partition("=")
    check_variable_name(name)
    if not equals and name not in env:
        raise UsageError(f"-x {name}: this variable is not set. Set it, or use -x {name}=VALUE.")
    return name, value if equals else env[name]


def split_words(text: str, *, source: str) -> tuple[str, ...]:
    """The words of a command, quoted as for a shell. Raises UsageError: a quote is not closed.

    Example:
        >>> split_words("--mca pml 'a b'", source="--launcher-args")
        ('--mca', 'pml', 'a b')
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{source} cannot be split into words ({error}): {text!r}. Correct its quotes."
        ) from None


def check_variable_name(name: str) -> None:
    """Refuse what is no variable, and the job's secret. Raises UsageError."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(
            f"{name!r} is not the name of a variable: use letters, digits and _, no digit first."
        )
    if name == SECRET_VARIABLE:
        raise UsageError(
            f"{name} cannot be exported, since other users can read command lines and job scripts. "
            "Leave it out: every job gets a new secret."
        )
