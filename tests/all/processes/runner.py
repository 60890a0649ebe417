"""`torchmn run` in a folder of its own, whose processes are all found."""

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

import torchmn
from tests.limits import limit
from torchmn.run.backend import find_mpirun, this_machine

MARK = "TORCHMN_TEST_MARK"
# For the Python of every rank: a start without torch's compiler, torchmn, and the tests.
PYTHON_PATH = os.pathsep.join(
    [
        str(Path(__file__).with_name("light")),
        str(Path(torchmn.__file__).parents[1]),
        str(Path(__file__).parents[3]),
    ]
)
# For an mpirun that root starts, without the networks of libfabric.
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",
}
RANK = (
    "import os; from tests.limits import limit; "
    'rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])\n'
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(
    *command: object, cwd: Path | None = None, limit_s: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with these variables to its end, whatever its exit status."""
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, **env},
        capture_output=True,
        text=True,
        timeout=limit(limit_s),
        check=False,
    )


def skip_without_mpi() -> None:
    if missing := this_machine(os.environ).missing_for_mpi:
        pytest.skip(reason=f"MPI lacks {missing}: install it with 'make setup'")


def mpirun_python(num_ranks: int) -> list[str]:
    """A command before a script, under an mpirun without torchmn; it needs `AS_ROOT`."""
    skip_without_mpi()
    words = [str(find_mpirun(os.environ)), "--oversubscribe", "-n", str(num_ranks)]
    return [*words, sys.executable]


def wait_until(
    condition: Callable[[], bool], what: object = "waited in vain", limit_s: float = 30
) -> None:
    deadline = time.monotonic() + limit(limit_s)
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def finish(process: subprocess.Popen[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """What a process has printed, at its end."""
    out, err = process.communicate(timeout=limit(limit_s))
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Runner:
    """Starts `torchmn run` in a folder of its own and finds every process of the job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RANK + text)
        return name

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """`torchmn run`, with the options of `start_python`."""
        return self.start_python("-m", "torchmn", "run", "--log-dir", "logs", *args, **options)

    def start_python(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """Python, with the options of `start_command`."""
        return self.start_command(sys.executable, *args, **options)

    def start_ranks(self, num_ranks: int, *args: str, **env: str) -> list[subprocess.Popen[str]]:
        """Python for each of the ranks that no launcher ends, as under srun without its -K."""
        size = str(num_ranks)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
        place |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        return [
            self.start_python(*args, **place, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(num_ranks)
        ]

    def start_command(
        self,
        *command: str,
        preexec_fn: Callable[[], None] | None = None,
        stdin: int | IO[bytes] | None = None,
        **env: str,
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": PYTHON_PATH, MARK: self.mark, **env},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=preexec_fn,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(limit(10))
            for pipe in (process.stdout, process.stderr):
                if pipe:
                    pipe.close()

    def run(self, *args: str, limit_s: float = 30, **env: str) -> subprocess.CompletedProcess[str]:
        return finish(self.start(*args, **env), limit_s)

    def run_command(
        self, *command: str, limit_s: float = 60, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return finish(self.start_command(*command, **env), limit_s)

    @property
    def logs(self) -> Path:
        """The log folder of the last run."""
        return self.folder / "logs" / "latest"

    def log(self, rank: int) -> str:
        return (self.logs / f"rank{rank}.log").read_text()

    def exit_record(self, rank: int) -> dict[str, object]:
        return json.loads((self.logs / f"rank{rank}.exit.json").read_text())

    def processes(self, *words: str) -> list[psutil.Process]:
        """The living processes of the job whose command holds all of the words."""
        found = []
        mark = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE and all(
                    word in " ".join(process.cmdline()) for word in words
                ):
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def wait_until(self, condition: Callable[[], bool], what: str, limit_s: float = 15) -> None:
        wait_until(condition, what, limit_s)

    def wait_until_nothing_is_left(self) -> None:
        deadline = time.monotonic() + limit(15)
        while left := self.processes():
            assert time.monotonic() < deadline, [process.cmdline() for process in left]
            time.sleep(0.02)
