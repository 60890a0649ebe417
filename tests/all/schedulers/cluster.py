"""A real scheduler on one machine: a login host with its server, and compute hosts of a lab."""

import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import torchmn
from tests.limits import limit
from tests.netlab import Host, Lab, missing_requirement, netlab

# Of every test under a scheduler.
MARKS = [
    pytest.mark.processes,
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get("TORCHMN_TEST_SCHEDULERS"), reason="'make test-schedulers' runs these"
    ),
]
PATIENCE_S = 60
_OF_SCHEDULERS = ("SLURM", "PBS", "SGE", "TORCHMN", "JOB_ID", "PE_", "OMPI_", "PMIX_")


class Cluster(ABC):
    """A login host and two compute hosts under one scheduler."""

    name: str  # as in ``torchmn submit --scheduler``
    tools: Sequence[str]
    path: str = ""  # folders, besides those of the machine, that hold the tools
    shortest_limit: str  # as ``--walltime``; Slurm counts minutes
    words_of_limit: str  # of the message about a job that exceeded it
    unknown_queue: str  # the scheduler's words about the queue ``nowhere``
    as_user: Sequence[str] = ()  # before a command of the cluster's user, if that is not root
    signal_options: Sequence[object] = ()  # with which a job gets SIGUSR1 without `send_signal`

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.login, *self.nodes = lab.hosts
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[str]] = {}

    @classmethod
    def why_not(cls) -> str | None:
        """Why no cluster can be made here, or ``None`` if it can."""
        missing = [tool for tool in cls.tools if shutil.which(tool, path=cls._path()) is None]
        if missing:
            return f"no {', '.join(missing)}: see 'make test-schedulers'"
        return missing_requirement()

    @classmethod
    def _path(cls) -> str:
        return ":".join(part for part in (cls.path, os.environ["PATH"], "/usr/sbin:/sbin") if part)

    @property
    def variables(self) -> Mapping[str, str]:
        """By which the commands find this cluster."""
        return {}

    @abstractmethod
    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """Delete a job, as its user does."""

    @abstractmethod
    def send_signal(self, job: str) -> None:
        """Send SIGUSR1 to a job, where a user can."""

    @abstractmethod
    def has_jobs(self) -> bool:
        """Whether any job waits or runs."""

    @abstractmethod
    def preempt(self, job: str) -> None:
        """Have the scheduler take a job's nodes away and put it back into the queue."""

    @abstractmethod
    def fail_node(self, host: Host) -> None:
        """Take a node down, with what runs on it."""

    @abstractmethod
    def repair_node(self, host: Host) -> None:
        """Bring it back, and wait until it is idle."""

    @property
    def env(self) -> dict[str, str]:
        """What a user of the cluster has."""
        own = {
            name: text for name, text in os.environ.items() if not name.startswith(_OF_SCHEDULERS)
        }
        return {
            **own,
            "PATH": f"{Path(sys.executable).parent}:{self._path()}",
            "PYTHONPATH": str(Path(torchmn.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }

    def popen(self, command: Sequence[object], cwd: Path, **env: str) -> subprocess.Popen[str]:
        """Start a command of the user on the login host, with its output in pipes."""
        return self._popen([*self.as_user, *command], cwd, env)

    def _popen(
        self, command: Sequence[object], cwd: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        return self.login.popen(
            [str(word) for word in command],
            env={**self.env, **env},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(
        self, command: Sequence[object], cwd: Path, timeout_s: float = 120, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the user on the login host."""
        return self._finish(self.popen(command, cwd, **env), command, timeout_s)

    def _finish(
        self, process: subprocess.Popen[str], command: Sequence[object], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        try:
            out, err = process.communicate(timeout=limit(timeout_s))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise TimeoutError(f"{command} ran longer than {timeout_s} s: {out}\n{err}") from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def ask(self, *command: object) -> str:
        """The output of a command of the administrator that must succeed."""
        done = self._finish(self._popen(command, self.folder, {}), command, 120)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submission(self, *words: object) -> list[object]:
        """The words of a `torchmn submit`, for jobs with our virtual environment."""
        command = [sys.executable, "-m", "torchmn", "submit", "--scheduler", self.name]
        command += ["--activate", sys.prefix, "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]
        command += ["--site", str(self.site_file)]
        command += [word for name in self.variables for word in ("-x", name)]
        return [*command, *words]

    @property
    def site_file(self) -> Path:
        """The settings of this cluster."""
        path = self.folder / "site.toml"
        path.write_text('[grid_engine]\nparallel_environment = "mpi"\n')
        return path

    def daemon(self, name: str, host: Host, command: Sequence[object], **env: str) -> None:
        """Start a daemon in the foreground, under a name."""
        with open(self.folder / "daemons.log", "a") as log:
            self._daemons[name] = host.popen(
                [str(word) for word in command],
                env={**self.env, **env},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        """End all daemons; the lab ends what they started."""
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(limit(10))

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition holds; the daemons' logs are in the error."""
        deadline = time.monotonic() + limit(PATIENCE_S)
        while not condition():
            if time.monotonic() > deadline:
                logs = {path.name: path.read_text()[-2000:] for path in self.folder.glob("*.log")}
                raise TimeoutError(f"No {what} within {PATIENCE_S} s: {logs}")
            time.sleep(0.1)


@contextmanager
def running(kind: type[Cluster], folder: Path) -> Iterator[Cluster]:
    """A cluster of two nodes for the length of a block. Skips: it cannot be made here."""
    if reason := kind.why_not():
        pytest.skip(reason=reason)
    folder.chmod(0o755)
    with netlab(3, None) as lab:
        cluster = kind(lab, folder)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
