"""Run a function as ranks on this machine from an ordinary Python process.

`start_local_ranks` does with the launcher's agents what ``torch.multiprocessing.spawn`` does with
plain processes: a launcher runs as a child of this process, and each rank has an agent that binds
it to its cores, monitors it, and ends it with the job. Function and arguments are pickled into a
private temporary folder. As with ``spawn``, every rank first imports the main script, unless its
caller is attached.
"""

import contextlib
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from signal import SIGTERM
from typing import Any

from torchmn.base.errors import UsageError
from torchmn.cluster.operating_system import require_linux
from torchmn.control.processes import kill_on_parent_death, python_module
from torchmn.run.job import Backend, Job
from torchmn.run.start import run_job

_MODULE = "torchmn.run.local_ranks"
_REPORT = "report"  # in the temporary folder: why the ranks failed
_GUARD = (
    "Ranks import the main script when they start, and it would start ranks again. Put what it "
    'does into a function main() and call it under if __name__ == "__main__":'
)


class LocalRanks:
    """The ranks that `start_local_ranks` started.

    ``process`` is their launcher, and ``log_dir`` the folder in which it makes its log folder.
    """

    def __init__(self, folder: Path, log_dir: Path) -> None:
        self.process: subprocess.Popen[bytes]
        self._folder = folder
        self._log_dir = log_dir
        self._is_reported = False

    @property
    def have_ended(self) -> bool:
        """Whether all ranks have ended, successfully or not."""
        return self.process.poll() is not None

    def failure(self, limit_s: float) -> str:
        """Return the launcher's report of a failure; empty if the ranks run or succeeded.

        Waits up to ``limit_s`` for the end of the ranks.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.wait(limit_s) != 0:
                # Where the launcher failed before the ranks ran, there are its own messages.
                for file in (self._folder / _REPORT, self._folder / "stderr"):
                    if file.exists():
                        self._is_reported = self._log_dir == self._folder
                        return file.read_text(errors="replace").strip()
        return ""

    def end(self, limit_s: float) -> None:
        """Wait for the end of all ranks, then enforce it.

        The folder with their output stays if `failure` has returned a report that refers to it.
        """
        for force in (self.process.terminate, self.process.kill, None):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(limit_s)
                break
            if force is not None:
                force()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        for file in [self._folder / "main", *self._folder.glob("call*")]:
            file.unlink(missing_ok=True)
        if not self._is_reported:
            shutil.rmtree(self._folder, ignore_errors=True)


def start_local_ranks(
    function: Callable[..., object],
    arguments: Sequence[tuple[Any, ...]],
    *,
    backend: Backend = "gloo",
    cores: Collection[int] = (),
    attached_logs: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> LocalRanks:
    """Start ``function(*arguments[rank])`` as ``len(arguments)`` ranks on this machine. Local.

    Args:
        function: is pickled by name, so it must be defined at the top level of a module.
        arguments: a tuple of picklable arguments for each rank.
        backend: the communication backend, as for ``torchmn run``.
        cores: the cores that the ranks share; if empty, all that this process may use.
        attached_logs: the caller is attached: it reads standard output and error of
            ``LocalRanks.process``, which are pipes, and forwards Ctrl-C; the main script is not
            imported, and log folders are made and kept here. Else ranks write where this process
            does.
        env: environment of the launcher and of the ranks; by default that of this process.

    Raises UsageError: a rank that is being started imports a script that calls this. Whatever
    pickle raises for the arguments is raised as it is.
    """
    require_linux("Starting ranks on this machine")
    raise_if_imported_by_rank()
    folder = Path(tempfile.mkdtemp(prefix="torchmn-"))  # readable by this user alone
    log_dir = attached_logs or folder
    ranks = LocalRanks(folder, log_dir)
    try:
        main = spawn.get_preparation_data("rank")
        del main["authkey"]  # a secret of multiprocessing, which refuses to pickle it
        if attached_logs is not None:
            for name in ("init_main_from_name", "init_main_from_path"):
                main.pop(name, None)
        (folder / "main").write_bytes(pickle.dumps(main))
        for rank, given in enumerate(arguments):
            (folder / f"call{rank}").write_bytes(pickle.dumps((function, given)))
        # Not SIGKILL: the launcher ends its ranks before it exits.
        prepare = kill_on_parent_death(SIGTERM)

        def prepare_launcher() -> None:
            if cores:
                os.sched_setaffinity(0, cores)
            prepare()

        with open(folder / "stderr", "wb") as errors:
            ranks.process = subprocess.Popen(
                [*python_module(_MODULE), str(folder), str(len(arguments)), backend, str(log_dir)],
                stdin=subprocess.DEVNULL,
                stdout=None if attached_logs is None else subprocess.PIPE,
                stderr=errors if attached_logs is None else subprocess.PIPE,
                env=None if env is None else dict(env),
                bufsize=0,
                # else a Ctrl-C of the terminal, or of Jupyter, would reach the launcher twice
                start_new_session=attached_logs is not None,
                preexec_fn=prepare_launcher,
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return ranks


def raise_if_imported_by_rank() -> None:
    """Raise UsageError in a rank that is being started and imports the main script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(_GUARD)


def _launch(folder: Path, num_ranks: int, backend: Backend, log_dir: Path) -> int:
    """Run the job in the child process and return its exit status."""
    parent = os.getppid()
    argv = (*python_module(_MODULE), str(folder))
    job = Job(
        argv=argv, num_ranks=num_ranks, backend=backend, log_dir=log_dir, report=folder / _REPORT
    )
    status = run_job(job, os.environ)
    if os.getppid() != parent:  # there is no reader of the report
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _run_rank(folder: Path) -> None:
    """Import the main script and call the function, as a child of multiprocessing would."""
    process: Any = multiprocessing.current_process()
    process._inheriting = True
    try:
        spawn.prepare(pickle.loads((folder / "main").read_bytes()))
    finally:
        del process._inheriting
    call = folder / f"call{os.environ['RANK']}"
    pickled = call.read_bytes()
    call.unlink()
    function, arguments = pickle.loads(pickled)
    function(*arguments)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _run_rank(Path(sys.argv[1]))
    else:
        own, number, chosen, logs = sys.argv[1:]
        sys.exit(_launch(Path(own), int(number), chosen, Path(logs)))  # type: ignore[arg-type]
