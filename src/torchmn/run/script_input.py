"""The standard input of `torchmn run`, which the script of rank 0 reads."""

import os
import stat
import subprocess
import sys
from pathlib import Path


def input_path() -> str:
    """The path of this process's input, for the script of rank 0; empty if it is not passed on.

    Only pipes and files are: a terminal belongs to the session of the shell, which ranks are not
    in, and sockets have no path.
    """
    path = f"/proc/{os.getpid()}/fd/0"
    if sys.__stdin__ is None or not os.path.exists(path):
        return ""
    mode = os.fstat(0).st_mode
    return path if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""


def open_input(path: str) -> int:
    """A descriptor of what `input_path` names, where that process has read up to now.

    By its path below ``/proc``, whatever is in between: an mpirun would read it even if the script
    does not, and that of Open MPI 5.0.2 stops after some KiB.
    `subprocess.DEVNULL` without a path, and where it cannot be opened.
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
