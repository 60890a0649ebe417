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

import torchmn
from tests.limits import limit

MARK = "TORCHMN_TEST_MARK"
# For the Python of every rank: a start without torch's compiler, torchmn, and the tests.
PYTHON_PATH = os.pathsep.join(
    [
        str(Path(__file__).with_name("light")),
        str(Path(torchmn.__file__).parents[1]),
        str(Path(__file__).parents[3]),
    ]
)
# For an mpirun that root starts.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
RANK = (
    "import os; from tests.limits import limit; "
    'rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])\n'
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(
    condition: Callable[[], bool], what: object = "waited in vain", limit_s: float = 30
) -> None:
    deadline = time.monotonic() + limit(limit_s)
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


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

    def start_python(
        self,
        *args: str,
        preexec_fn: Callable[[], None] | None = None,
        stdin: int | IO[bytes] | None = None,
        **env: str,
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *args],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": PYTHON_PATH, MARK: self.mark, **env},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=limit(limit_s))
        return subprocess.CompletedProcess(args, process.returncode, out, err)

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
