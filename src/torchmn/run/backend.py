"""Choose the communication backend from facts about this machine; the folders of Open MPI.

Open MPI keeps a segment of each rank in /dev/shm, which MPI_Finalize or mpirun removes. Where both
are killed, it would take 16 MB of the node's memory until the node is restarted. And mpirun keeps
files in a folder that is named by its process id: where it is killed, a later mpirun that gets the
same id finds them and ends with "The PMIx server's listener thread failed to start". Here both are
in folders of the agent's and of the launcher's own, which are removed at the end. The folder of a
process that was killed as well is removed by the launcher at the end of the job, and by the next
one of the same user on its machine: its lock is free.
"""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from torchmn.base.errors import UnknownNameError, UnsupportedError
from torchmn.cluster.gpus import count_gpus, may_share_gpus, shared_gpu_problem
from torchmn.cluster.units import counted
from torchmn.run.job import Backend

BACKENDS = ("auto", "gloo", "nccl", "mpi")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about a machine that decide which backends work.

    Example:
        >>> Machine(num_gpus=2).missing_for_mpi
        'an mpirun and mpi4py'
    """

    num_gpus: int = 0
    can_share_gpus: bool = False
    mpirun: str | None = None
    has_mpi4py: bool = False

    def missing_for_nccl(self, num_ranks: int) -> str:
        """What NCCL lacks for so many ranks; empty if it can run."""
        return shared_gpu_problem(num_ranks, self.num_gpus, may_share=self.can_share_gpus)

    @property
    def missing_for_mpi(self) -> str:
        """Names of what MPI lacks on this machine; empty if it can run."""
        lacking = [
            *([] if self.mpirun else ["an mpirun"]),
            *([] if self.has_mpi4py else ["mpi4py"]),
        ]
        return " and ".join(lacking)


def this_machine(env: Mapping[str, str]) -> Machine:
    """Return the facts about this machine, without importing torch or MPI. Local.

    Example:
        >>> import os
        >>> this_machine(os.environ).num_gpus >= 0
        True
    """
    return Machine(
        num_gpus=count_gpus(env),
        can_share_gpus=may_share_gpus(env),
        mpirun=find_mpirun(env),
        has_mpi4py=PathFinder.find_spec("mpi4py") is not None,
    )


def find_mpirun(env: Mapping[str, str]) -> str | None:
    """Path of the mpirun beside this Python (of the wheel that mpi4py loads), else on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    if beside.is_file():
        return str(beside)
    return shutil.which("mpirun", path=env.get("PATH")) or shutil.which(
        "mpiexec", path=env.get("PATH")
    )


def choose_backend(
    wanted: str, machine: Machine, num_ranks: int, *, mpi_problem: str = ""
) -> tuple[Backend, str]:
    """Return the backend to use and the reason for it.

    ``auto`` is nccl with a GPU for every rank, else mpi where it is installed (inside a machine it
    is faster than gloo), else gloo. ``mpi_problem`` is why the job cannot use the mpirun of this
    machine.

    Raises UnknownNameError: no such backend. Raises UnsupportedError: it cannot work here.

    >>> from torchmn.run.backend import choose_backend, this_machine
    >>> backend, why = choose_backend("gloo", this_machine({}), 2)
    >>> backend
    'gloo'
    """
    if wanted not in BACKENDS:
        raise UnknownNameError("backend", wanted, BACKENDS)
    if wanted == "gloo":
        return "gloo", "as requested"
    found = counted(machine.num_gpus, "CUDA GPU") if machine.num_gpus else "no CUDA GPU"
    if wanted == "nccl":
        if problem := machine.missing_for_nccl(num_ranks):
            raise UnsupportedError(
                f"{problem}, and this machine has {found}: start fewer ranks, or use backend gloo "
                "or mpi, and check CUDA_VISIBLE_DEVICES."
            )
        return "nccl", "as requested"
    if wanted == "mpi":
        if machine.missing_for_mpi:
            raise UnsupportedError(
                f"--backend mpi needs {machine.missing_for_mpi}, which this Python "
                f"({sys.executable}) does not find: install torchmn[mpi], or use --backend gloo."
            )
        if mpi_problem:
            raise UnsupportedError(f"--backend mpi: {mpi_problem}. Or use --backend gloo.")
        return "mpi", "as requested"
    if not machine.missing_for_nccl(num_ranks):
        return "nccl", "a GPU for every rank"
    why = f"fewer GPUs ({machine.num_gpus}) than ranks" if machine.num_gpus else "no GPU"
    if mpi_problem:
        return "gloo", f"{why}, no MPI: {mpi_problem}"
    if machine.missing_for_mpi:
        missing = f": {machine.missing_for_mpi} missing"
        return "gloo", f"{why}, no MPI" + (missing if machine.mpirun or machine.has_mpi4py else "")
    return "mpi", why


SHARED_MEMORY = Path("/dev/shm")
# The names that Open MPI 5 reads, and earlier versions.
VARIABLES = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
# Read by the mpirun of Open MPI 5 alone.
SESSION_VARIABLE = "PRTE_MCA_prte_local_tmpdir_base"
_PREFIX = "torchmn-open-mpi-"
_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"


@contextmanager
def open_mpi_memory(env: Mapping[str, str], root: Path = SHARED_MEMORY) -> Iterator[dict[str, str]]:
    """Yield variables that give the script a folder for Open MPI's shared memory.

    Yields nothing under another launcher, or where the user has chosen a folder.
    """
    is_chosen = any(name in env for name in VARIABLES)
    if _OPEN_MPI not in env or is_chosen or not os.access(root, os.W_OK | os.X_OK):
        yield {}
        return
    with _own_folder(root) as folder:
        yield dict.fromkeys(VARIABLES, str(folder)) if folder else {}


@contextmanager
def open_mpi_session(env: Mapping[str, str], root: Path | None = None) -> Iterator[dict[str, str]]:
    """Yield the variable that gives mpirun its own folder; nothing if the user has chosen one."""
    if SESSION_VARIABLE in env or "PRTE_MCA_prte_tmpdir_base" in env:
        yield {}
        return
    with _own_folder(root or Path(tempfile.gettempdir())) as folder:
        yield {SESSION_VARIABLE: str(folder)} if folder else {}


@contextmanager
def _own_folder(root: Path) -> Iterator[Path | None]:
    """Yield a new folder of this process in ``root``, or None if it cannot be created."""
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
    """Create a folder; return it and the descriptor that keeps it locked until it is closed."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # another agent may have taken it for abandoned before it was locked
            return folder, lock
        os.close(lock)


def remove_abandoned(root: Path = SHARED_MEMORY) -> None:
    """Remove folders that processes of this user have left because they were killed."""
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
