"""Every row of docs/reference/exit-status.md, under every launcher that is here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.processes.exit_status import LAUNCHERS, PAGE, ROWS, Launcher, Row, table
from tests.processes.runner import MARK, PYTHON_PATH, Runner
from torchmn.launch.backend import find_mpirun, this_machine
from torchmn.testing.netlab import Lab, missing_requirement, netlab

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SCRIPT = """
import pathlib, signal, sys, time
mode, seen = sys.argv[1], []

def note(signum, frame):
    seen.append(signal.Signals(signum).name)
    pathlib.Path(f"seen{rank}").write_text(" ".join(seen))
    if mode != "saves":
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)

for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"):
    signal.signal(getattr(signal, name), note)
pathlib.Path(f"ready{rank}").touch()
while not all(pathlib.Path(f"ready{each}").exists() for each in range(2)):
    time.sleep(0.01)
if mode == "exits" and rank == 1:
    sys.exit(3)
if mode == "raises" and rank == 1:
    raise ValueError("the cause")
while mode != "ends" and not seen:
    time.sleep(0.01)
if seen:
    time.sleep(0.3)
    sys.exit(85)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with netlab(2, None) as made:
        yield made


def command_of(launcher: Launcher, script: str) -> list[str]:
    run = ["-m", "torchmn", "run", "--log-dir", "logs", "--grace", "20"]
    if launcher in ("mpirun", "plain mpirun"):
        mpirun = find_mpirun(os.environ)
        if mpirun is None or this_machine(os.environ).missing_for_mpi:
            pytest.skip(reason="no MPI: install it with 'make setup'")
        if launcher == "mpirun":
            return [sys.executable, *run, "--backend", "mpi", "-n", "2", script]
        return [mpirun, "--oversubscribe", "-n", "2", sys.executable, script]
    if launcher == "plain torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    hosts = ["--hosts", "n0:1,n1:1"] if launcher == "ssh" else ["-n", "2"]
    return [sys.executable, *run, "--backend", "gloo", "--launcher", launcher, *hosts, script]


def start(
    launcher: Launcher, runner: Runner, mode: str, request: pytest.FixtureRequest
) -> subprocess.Popen[str]:
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen
    env = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        MARK: runner.mark,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    if launcher == "ssh":
        missing = missing_requirement()
        if missing:
            pytest.skip(reason=f"no test hosts: {missing}")
        lab: Lab = request.getfixturevalue("lab")
        popen, env["TORCHMN_RSH"] = lab.hosts[0].popen, str(lab.rsh_agent)
    return popen(
        [*command_of(launcher, runner.script(SCRIPT)), mode],
        env=env,
        cwd=runner.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **({} if launcher == "ssh" else {"text": True}),
    )


def act(row: Row, process: subprocess.Popen[str], runner: Runner) -> None:
    """Send the signal of a row once all ranks are ready."""
    runner.wait_until(
        lambda: all((runner.folder / f"ready{rank}").exists() for rank in range(2)),
        "the scripts did not start",
        limit_s=60,
    )
    signum = getattr(signal, row.signum)
    scripts = [
        each
        for each in runner.processes("script.py")
        if not {"torchmn", "torch.distributed.run", "--oversubscribe", "agent_main"}
        & set(" ".join(each.cmdline()).replace(".agent_main", " agent_main").split())
    ]
    assert len(scripts) == 2, [each.cmdline() for each in scripts]
    if row.target == "launcher":
        psutil.Process(process.pid).send_signal(signum)
    elif row.target == "one script":
        scripts[1].send_signal(signum)
    else:
        for script in scripts:
            os.kill(script.ppid(), signum)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_row(launcher: Launcher, row: Row, runner: Runner, request: pytest.FixtureRequest) -> None:
    if launcher not in row.statuses:
        pytest.skip(reason="not a row of the table")
    process = start(launcher, runner, row.script, request)
    if row.signum:
        act(row, process, runner)
    _, err = process.communicate(timeout=90)
    code = process.returncode
    assert (128 - code if code < 0 else code) == row.statuses[launcher], err
    seen = {path.name: path.read_text() for path in runner.folder.glob("seen*")}
    if row.sees.endswith(", once"):
        assert seen == dict.fromkeys(("seen0", "seen1"), row.sees.removesuffix(", once"))
    runner.wait_until_nothing_is_left()


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text()


def test_every_row_is_one_of_the_launcher_that_is_always_here() -> None:
    assert all("local" in row.statuses for row in ROWS)
    assert len({row.what for row in ROWS}) == len(ROWS)
