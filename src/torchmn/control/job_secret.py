"""The secret that the user gives a job whose hosts are started one by one.

Otherwise `torchmn run` makes a secret for each job, and sends it to the hosts that it starts.
"""

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from torchmn.base.errors import UsageError
from torchmn.cluster.environment_variables import SECRET_FILE_VARIABLE, SECRET_VARIABLE
from torchmn.control.rank_claim import claimed_by

_MIN_CHARS = 16
_HOW = (
    f"Make one with `(umask 077; openssl rand -hex 32 > secret)`, copy that file to all hosts, and "
    f"set {SECRET_FILE_VARIABLE}=secret on each of them."
)


def given_secret(env: Mapping[str, str], purpose: str) -> str:
    """Return the secret in the file that ``TORCHMN_SECRET_FILE`` names, or in ``TORCHMN_SECRET``.

    ``purpose`` is what needs it, for messages. Raises UsageError: there is none, it is too short,
    or other users may read the file.
    """
    path, text = env.get(SECRET_FILE_VARIABLE, ""), env.get(SECRET_VARIABLE, "")
    if (path or text) and claimed_by(env) is not None:
        path = text = ""  # they are those of the job whose rank has started this one
    here = socket.gethostname()
    if path and text:
        raise UsageError(
            f"{SECRET_FILE_VARIABLE} and {SECRET_VARIABLE} are both set on {here}: unset one of "
            "them."
        )
    source = f"the file {path!r} of {SECRET_FILE_VARIABLE}" if path else SECRET_VARIABLE
    if path:
        text = _read(path, here)
    elif not text:
        raise UsageError(
            f"{purpose} needs a secret that all hosts know, and neither {SECRET_FILE_VARIABLE} nor "
            f"{SECRET_VARIABLE} is set on {here}. {_HOW}"
        )
    if len(text) < _MIN_CHARS:
        raise UsageError(
            f"The secret in {source} on {here} has {len(text)} characters and must have at least "
            f"{_MIN_CHARS}, or others could guess it. {_HOW}"
        )
    return text


def _read(path: str, here: str) -> str:
    """Return the text of a file that no other user may read. Raises UsageError."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            # Of the open file: at its path there may be another one a moment later.
            mode = os.fstat(file.fileno()).st_mode
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"The file {path!r} of {SECRET_FILE_VARIABLE} cannot be read on {here}: {why}. {_HOW}"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"Other users of {here} may read the secret in {path!r} (mode {mode & 0o777:o}): run "
            f"`chmod 600 {path}`."
        )
    return text
