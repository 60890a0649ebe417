"""Ensure one process per rank, although programs that a rank starts inherit its variables.

A process that joins the others as the rank of its launcher claims that rank: it keeps a file in
memory open whose name holds a digest of the launcher's variables and its process number. A process
with the same variables finds it by looking at the processes that started it, and at those that they
have started. The claim ends with the process that made it. Linux only: elsewhere nothing is found.
"""

import hashlib
import os
from collections.abc import Mapping

from torchmn.base.errors import UsageError
from torchmn.cluster.environment_variables import ROUND_VARIABLE, SECRET_VARIABLE
from torchmn.cluster.launcher_env import LAUNCHERS, LauncherInfo
from torchmn.control.port_discovery import JOB_VARIABLES
from torchmn.control.processes import ancestors, descendants, environment_of, files_of

# The variables that tell a rank of a job from all others.
_NAMES = frozenset(
    {
        *(name for row in LAUNCHERS for name in (*row.rank, *row.size)),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        *(SECRET_VARIABLE, ROUND_VARIABLE, *JOB_VARIABLES),
    }
)
_claims: dict[str, int] = {}  # the open file of each claim of this process, by name


def claim_rank(place: LauncherInfo, env: Mapping[str, str]) -> None:
    """Claim the rank ``place``, which was read from ``env``, for this process. Local.

    Raises UsageError: another process has joined as this rank.
    """
    name = _name(_digest(env), os.getpid())
    if name in _claims or place.known_size == 1 or not hasattr(os, "memfd_create"):
        return
    _claims[name] = os.memfd_create(name)  # before looking: of two that begin together one sees
    holder = claimed_by(env)
    if holder is not None:
        os.close(_claims.pop(name))
        raise_started_by_rank(place, holder)


def claimed_by(env: Mapping[str, str]) -> int | None:
    """Return the process that has joined as the rank that ``env`` describes, or None. Local."""
    own, digest = os.getpid(), _digest(env)
    if not _NAMES & env.keys():
        return None
    above = ancestors(own)
    same = [pid for pid in above if _digest(environment_of(pid)) == digest]
    # From the topmost process of this rank down: it may have started several side by side.
    family = (*above, *(descendants(same[-1]) if same else ()))
    return next((pid for pid in family if pid != own and _has_claim(pid, digest)), None)


def raise_started_by_rank(place: LauncherInfo, holder: int) -> None:
    """Raise UsageError: this process is no rank, but ``holder`` is. Local."""
    names = " ".join(name for name, _ in place.variables)
    raise UsageError(
        f"Process {os.getpid()} was started by rank {place.rank} of a job (process {holder}) and "
        f"has inherited its variables ({place.words}): it would wait for the other ranks. Start a "
        "program as a job of its own (torchmn run -n 1 SCRIPT), which clears them, or without them "
        f"(unset {names}; not enough under MPI). A function in a child process, such as a worker "
        "of a DataLoader, must not make a communicator."
    )


def _digest(env: Mapping[str, str]) -> str:
    found = sorted((name, text) for name, text in env.items() if name in _NAMES)
    return hashlib.sha256(repr(found).encode()).hexdigest()[:32]


def _name(digest: str, pid: int) -> str:
    return f"torchmn rank {digest} of process {pid}"


def _has_claim(pid: int, digest: str) -> bool:
    """Whether a process has claimed this rank; a child that it forked has its open files, too."""
    return f"/memfd:{_name(digest, pid)} (deleted)" in files_of(pid)
