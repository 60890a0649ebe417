"""The standard input of `torchmn run`, which the script of rank 0 reads."""

import os
import stat
import subprocess
import sys
from pathlib import Path


def input_path() -> str:
    """Return the path of standard input for rank 0's script; empty if it cannot be passed on.

    Only pipes and files can: a terminal belongs to the session of the shell, which ranks are not
    in, and sockets cannot be opened by a path.
    """
    path = f"/proc/{os.getpid()}/fd/0"
    if sys.__stdin__ is None or not os.path.exists(path):
        return ""
    mode = os.fstat(0).st_mode
    return path if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""


def open_input(path: str) -> int:
    """Open the input that `input_path` names, at the position of the process that owns it.

    Returns a descriptor, or `subprocess.DEVNULL` without a path or if it cannot be opened. The
    input is opened below ``/proc`` rather than passed through the launcher: mpirun reads it even if
    the script does not, and the mpirun of Open MPI 5.0.2 stops after some KiB.
    """
    if not path:
        return subprocess.DEVNULL
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe may have no writer yet
        os.set_blocking(number, True)
        if stat.S_ISREG(os.fstat(number).st_mode):
            position = Path(path.replace("/fd/", "/fdinfo/")).read_text().split()[1]
            os.lseek(number, int(position), os.SEEK_SET)
    except OSError:
        return subprocess.DEVNULL
    return number
