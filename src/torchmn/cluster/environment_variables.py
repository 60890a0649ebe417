"""The names of torchmn's environment variables, and the parser of ``-x NAME=VALUE``.

``docs/reference/environment.md`` describes them. Users set some of them; the others are set by one
process of torchmn for another.
"""

import re
import shlex
from collections.abc import Mapping

from torchmn.base.errors import UsageError
from torchmn.base.log import LOG_VARIABLE as LOG_VARIABLE

BACKEND_VARIABLE = "TORCHMN_BACKEND"
EXIT_TIMEOUT_VARIABLE = "TORCHMN_EXIT_TIMEOUT_S"
HEARTBEAT_VARIABLE = "TORCHMN_HEARTBEAT_S"
HOSTS_VARIABLE = "TORCHMN_HOSTS"
INPUT_RANK_VARIABLE = "TORCHMN_INPUT_RANK"
JOB_VARIABLE = "TORCHMN_JOB"
JOB_END_VARIABLE = "TORCHMN_JOB_END"
MONITOR_VARIABLE = "TORCHMN_MONITOR"
PROGRESS_VARIABLE = "TORCHMN_PROGRESS_FILE"
PROFILE_VARIABLE = "TORCHMN_PROFILE"
RECORD_VARIABLE = "TORCHMN_RECORD"
ROUND_VARIABLE = "TORCHMN_ROUND"
RSH_VARIABLE = "TORCHMN_RSH"
SECRET_VARIABLE = "TORCHMN_SECRET"
SECRET_FILE_VARIABLE = "TORCHMN_SECRET_FILE"
SHARE_GPU_VARIABLE = "TORCHMN_SHARE_GPU"
SUPERVISOR_VARIABLE = "TORCHMN_SUPERVISOR"
TRACEBACK_VARIABLE = "TORCHMN_TRACEBACK"
TRANSPORT_VARIABLE = "TORCHMN_TRANSPORT"


def parse_variable(text: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return name and value of one ``-x``; a bare name gets its value from ``env``.

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
    """Split a command into words as a shell does. Raises UsageError: a quote is not closed.

    Example:
        >>> split_words("--mca pml 'a b'", source="--launcher")
        ('--mca', 'pml', 'a b')
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{source} cannot be split into words ({error}): {text!r}. Correct its quotes."
        ) from None


def check_variable_name(name: str) -> None:
    """Raise UsageError for an invalid name, and for the variable of the job's secret."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(
            f"{name!r} is not the name of a variable: use letters, digits and _, no digit first."
        )
    if name == SECRET_VARIABLE:
        raise UsageError(
            f"{name} cannot be exported, since other users can read command lines and job scripts. "
            "Leave it out: every job gets a new secret."
        )
