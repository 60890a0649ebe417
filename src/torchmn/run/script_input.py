"""The standard input of `torchmn run`, which the script of one rank reads."""

import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torchmn.base.errors import UsageError
from torchmn.cluster.environment_variables import INPUT_RANK_VARIABLE
from torchmn.cluster.network import is_this_host
from torchmn.run.job import Job


def input_rank(env: Mapping[str, str]) -> int:
    """Return the rank that reads the standard input. Raises UsageError.

    >>> input_rank({})
    0
    """
    text = env.get(INPUT_RANK_VARIABLE) or "0"
    if not text.isdecimal():
        raise UsageError(f"{INPUT_RANK_VARIABLE} must be the number of a rank, got {text!r}.")
    return int(text)


def input_path(job: Job, env: Mapping[str, str]) -> str:
    """Return the path of standard input for a rank's script; empty if it cannot be passed on.

    Only terminals, pipes and files can: sockets cannot be opened by a path. The rank must run on
    this host, and its agent be started by this process or by a local mpirun. Raises UsageError:
    there is no such rank.
    """
    rank = input_rank(env)
    if rank >= job.num_ranks:
        raise UsageError(
            f"{INPUT_RANK_VARIABLE} is {rank}, and ranks are 0 to {job.num_ranks - 1}."
        )
    host = next(host for i, host in enumerate(job.hosts) if rank in job.ranks_on(i))
    path = f"/proc/{os.getpid()}/fd/0"
    is_passed = job.launcher in ("local", "ssh") or not job.has_other_hosts
    if not is_passed or not is_this_host(host.name):
        return ""
    if sys.__stdin__ is None or not os.path.exists(path):
        return ""
    mode = os.fstat(0).st_mode
    return path if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or _is_terminal() else ""


def terminal_variables(job: Job, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that tells scripts which rank has the terminal, if one has."""
    has_terminal = _is_terminal() and input_path(job, env)
    return {INPUT_RANK_VARIABLE: str(input_rank(env))} if has_terminal else {}


def _is_terminal() -> bool:
    """Whether standard input is a terminal in whose foreground this process runs.

    Ranks have sessions of their own, so that the system would let them read what is typed while
    this process is in the background, in place of the shell.
    """
    with suppress(OSError):
        return os.tcgetpgrp(0) == os.getpgrp()
    return False


def open_input(path: str) -> int:
    """Open the input that `input_path` names, at the position of the process that owns it.

    Returns a descriptor, or `subprocess.DEVNULL` without a path or if it cannot be opened. The
    input is opened below ``/proc`` rather than passed through the launcher: mpirun reads it even if
    the script does not, and the mpirun of Open MPI 5.0.2 stops after some KiB.
    """
    if not path:
        return subprocess.DEVNULL
    try:
        # O_NONBLOCK: a named pipe may have no writer yet. O_NOCTTY: the terminal is the launcher's.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.set_blocking(number, True)
        if stat.S_ISREG(os.fstat(number).st_mode):
            position = Path(path.replace("/fd/", "/fdinfo/")).read_text().split()[1]
            os.lseek(number, int(position), os.SEEK_SET)
    except OSError:
        return subprocess.DEVNULL
    return number
