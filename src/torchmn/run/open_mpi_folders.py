"""Files of Open MPI that do not outlive their job.

Open MPI keeps a segment of each rank in /dev/shm, which MPI_Finalize or mpirun removes. Where both
are killed, it would take 16 MB of the node's memory until the node is restarted. And mpirun keeps
files in a folder that is named by its process id: where it is killed, a later mpirun that gets the
same id finds them and ends with "The PMIx server's listener thread failed to start". Here both are
in folders of the agent's and of the launcher's own, which are removed at the end. The folder of a
process that was killed as well is removed by the launcher at the end of the job, and by the next
one of the same user on its machine: its lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
VARIABLES = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
"""Of Open MPI 5, and of those before it."""
SESSION_VARIABLE = "PRTE_MCA_prte_local_tmpdir_base"
"""Of the mpirun of Open MPI 5; another mpirun does not read it."""
_PREFIX = "torchmn-open-mpi-"
_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"


@contextmanager
def open_mpi_memory(env: Mapping[str, str], root: Path = SHARED_MEMORY) -> Iterator[dict[str, str]]:
    """The variables of a rank's script; nothing under another launcher or where the user chose."""
    is_chosen = any(name in env for name in VARIABLES)
    if _OPEN_MPI not in env or is_chosen or not os.access(root, os.W_OK | os.X_OK):
        yield {}
        return
    with _own_folder(root) as folder:
        yield dict.fromkeys(VARIABLES, str(folder)) if folder else {}


@contextmanager
def open_mpi_session(env: Mapping[str, str], root: Path | None = None) -> Iterator[dict[str, str]]:
    """The variable that gives mpirun a folder of its own; nothing where the user chose one."""
    if SESSION_VARIABLE in env or "PRTE_MCA_prte_tmpdir_base" in env:
        yield {}
        return
    with _own_folder(root or Path(tempfile.gettempdir())) as folder:
        yield {SESSION_VARIABLE: str(folder)} if folder else {}


@contextmanager
def _own_folder(root: Path) -> Iterator[Path | None]:
    """A new folder of this process in ``root``; None if there is no space or no more files."""
    remove_abandoned(root)
    try:
        folder, lock = _locked_folder(root)
    except OSError:  # Open MPI says so itself, or needs no folder
        yield None
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(root: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock while this process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # another agent may have taken it for abandoned before it was locked
            return folder, lock
        os.close(lock)


def remove_abandoned(root: Path = SHARED_MEMORY) -> None:
    """Remove the folders of this user's agents that were killed."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, in use, or removed by another agent
            if folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
