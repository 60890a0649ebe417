"""`torchmn inspect` of real jobs: at work, stuck, with the GIL held, ended, of other launchers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.all.processes.runner import (
    AS_ROOT,
    PYTHON_PATH,
    Runner,
    finish,
    mpirun_python,
    wait_until,
)
from tests.json_schemas import checked
from tests.limits import limit
from tests.marks import ON_TEST_HOSTS
from tests.netlab import netlab

pytestmark = pytest.mark.processes

SCRIPT = """
import ctypes, pathlib, sys, time
import torch, torchmn
from torchmn.run import install_crash_handler
what = sys.argv[1]
if what == "early":
    pathlib.Path(f"ready{rank}").touch()
    time.sleep(1000)
comm = torchmn.create_communicator("naive")
install_crash_handler(comm)
model = torch.nn.Linear(8, 8)
optimizer = torchmn.create_multi_node_optimizer(
    torch.optim.SGD(model.parameters(), 0.1), comm, model
)

def train():
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()

def load_slowly():
    time.sleep(1000)

def hold_the_gil():
    ctypes.PyDLL(None).sleep(1000)

for _ in range(3):
    train()
pathlib.Path(f"ready{comm.rank}").touch()
if comm.rank == 1 and what == "sleep":
    load_slowly()
if comm.rank == 1 and what == "gil":
    hold_the_gil()
is_over = False
while not is_over:
    train()
    is_over = bool(comm.allreduce(torch.tensor(float(pathlib.Path("over").exists())), "max"))
print("weight", float(model.weight.sum()))
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def inspect(runner: Runner, *words: str) -> subprocess.CompletedProcess[str]:
    return finish(runner.start_python("-m", "torchmn", "inspect", *words), 60)


def started(runner: Runner, *words: str, num_ranks: int = 2, **env: str) -> Any:
    process = runner.start("-n", str(num_ranks), *words, **env)
    wait_for_ranks(runner.folder, num_ranks)
    return process


def wait_for_ranks(folder: Path, num_ranks: int) -> None:
    wait_until(
        lambda: all((folder / f"ready{rank}").exists() for rank in range(num_ranks)),
        "not all ranks train",
        60,
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=limit(60))


@pytest.mark.parametrize("backend", ["gloo", "mpi"], indirect=True)
def test_a_job_at_work_goes_on_as_before(runner: Runner, backend: str) -> None:
    process = started(runner, "--backend", backend, runner.script(SCRIPT), "work")
    texts = [inspect(runner, "logs") for _ in range(3)]
    found = checked("inspect", inspect(runner, "logs/latest", "--json").stdout)
    (runner.folder / "over").touch()
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, err
    for text in texts:
        assert text.returncode == 0, text.stderr
        assert text.stdout.startswith(f"{runner.logs.resolve()}: 2 ranks on 1 host, running for ")
        assert text.stdout.count("last collectives:") == 2
    assert [state["rank"] for state in found["ranks"]] == [0, 1]
    for state in found["ranks"]:
        assert state["text"] == ""
        reply = state["reply"]
        assert "script.py" in reply["script_stack"]
        assert len(reply["recent"]) == 8
        assert reply["rss_nbytes"] > 10_000_000
        assert reply["device_nbytes"] == 0
        assert [engine["ranks"] for engine in reply["engines"]] == [[]]
    weights = {line.split()[-1] for line in out.splitlines() if " weight " in line}
    assert len(weights) == 1
    assert not (runner.logs / "inspect.json").exists()
    ended = inspect(runner, "logs")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "has ended: there is nothing to inspect" in ended.stderr


def test_a_rank_that_the_others_wait_for(runner: Runner) -> None:
    process = started(runner, "--backend", "gloo", runner.script(SCRIPT), "sleep")

    def cause() -> str:
        return inspect(runner, "logs").stdout.splitlines()[1]

    wait_until(lambda: "rank 1 did not reach it" in cause(), cause, 60)
    assert "script.py:" in cause()
    assert " in load_slowly " in cause()
    full = inspect(runner, "logs", "--full").stdout
    assert "torchmn-exchange" in full or "torchmn-record" in full  # other threads
    kill(process)


def test_a_rank_that_holds_the_gil(runner: Runner) -> None:
    process = started(runner, "--backend", "gloo", runner.script(SCRIPT), "gil")
    found = checked("inspect", inspect(runner, "logs", "--json").stdout)
    stuck = found["ranks"][1]["reply"]
    assert stuck["process"] == "sleeping"
    assert stuck["rss_nbytes"] > 10_000_000
    text = inspect(runner, "logs").stdout
    assert "rank 1 on" in text
    assert "does not answer: its process sleeps" in text
    assert "it is in C code that holds Python's global interpreter lock (GIL)" in text
    kill(process)


def test_ranks_without_a_communicator(runner: Runner) -> None:
    process = started(runner, "--backend", "gloo", runner.script(SCRIPT), "early")
    text = inspect(runner, "logs").stdout
    assert text.splitlines()[1] == "No rank is in a collective."
    assert text.count("time.sleep(1000)") == 2
    kill(process)


def test_an_elastic_job(runner: Runner) -> None:
    script = runner.script(SCRIPT)
    process = runner.start("--hosts", "localhost:2", "--elastic", "1:1", script, "work")
    wait_for_ranks(runner.folder, 2)
    found = checked("inspect", inspect(runner, "logs", "--json").stdout)
    assert all(state["reply"]["recent"] for state in found["ranks"])
    (runner.folder / "over").touch()
    process.communicate(timeout=limit(60))
    assert process.returncode == 0


@contextmanager
def started_by(launcher: str, runner: Runner, what: str) -> Iterator[tuple[Any, Path]]:
    """A job that torchmn did not start, and the folder in which its server can be asked."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    command = mpirun_python(3) if launcher == "mpirun" else [*torchrun, "--nproc-per-node=3"]
    process = runner.start_command(*command, runner.script(SCRIPT), what, **AS_ROOT)
    try:
        wait_for_ranks(runner.folder, 3)
        (folder,) = (runner.folder / "torchmn-logs").iterdir()
        wait_until(lambda: (folder / "inspect.json").exists())
        yield process, folder
    finally:
        process.terminate()
        process.communicate(timeout=limit(60))


EACH_LAUNCHER = pytest.mark.parametrize(
    "launcher", [pytest.param("mpirun", marks=pytest.mark.mpi), "torchrun"]
)


@EACH_LAUNCHER
def test_a_job_of_another_launcher_is_found_by_its_process(runner: Runner, launcher: str) -> None:
    """Its script calls `install_crash_handler`, whose server follows the ranks."""
    with started_by(launcher, runner, "work") as (process, folder):
        found = checked("inspect", inspect(runner, str(folder), "--json").stdout)
        (runner.folder / "over").touch()
        out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, out + err
    assert [len(state["reply"]["recent"]) for state in found["ranks"]] == [8, 8, 8]
    wait_until(lambda: not folder.exists())


@EACH_LAUNCHER
def test_a_rank_that_the_others_wait_for_under_another_launcher(
    runner: Runner, launcher: str
) -> None:
    with started_by(launcher, runner, "sleep") as (_, folder):

        def text() -> str:
            return inspect(runner, str(folder)).stdout

        wait_until(lambda: "rank 1 did not reach it" in text(), text, 60)
        assert re.search(r"script\.py:\d+ in load_slowly ", text())
    runner.wait_until_nothing_is_left()


@pytest.mark.timeout(180)
class TestOnTwoHosts:
    """The job is inspected on the host where it was started; elsewhere the error names it."""

    pytestmark = ON_TEST_HOSTS

    def test_both_ranks_are_shown(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(f"import os\nrank = int(os.environ['RANK'])\n{SCRIPT}")
        with netlab(2, None) as lab:
            own = {"PYTHONPATH": PYTHON_PATH, "TORCHMN_RSH": str(lab.rsh_agent)}
            options: dict[str, Any] = {
                "env": {**os.environ, **own},
                "cwd": tmp_path,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
            }
            hosts = ",".join(f"{host.name}:1" for host in lab.hosts)
            words = ["run", "--log-dir", "logs", "--hosts", hosts, "--backend", "gloo"]
            command = [sys.executable, "-m", "torchmn"]
            job = lab.hosts[0].popen([*command, *words, "script.py", "work"], **options)
            try:
                wait_for_ranks(tmp_path, 2)
                answers = [
                    host.popen([*command, "inspect", "logs"], **options) for host in lab.hosts
                ]
                (text, _), (_, error) = (each.communicate(timeout=limit(60)) for each in answers)
                (tmp_path / "over").touch()
                _, err = job.communicate(timeout=limit(60))
            finally:
                job.kill()
        assert job.returncode == 0, err
        assert "2 ranks on 2 hosts, running for " in text
        assert text.count("last collectives:") == 2
        assert answers[1].returncode == 1
        assert f"was started on {lab.hosts[0].name}, and this is {lab.hosts[1].name}" in error
