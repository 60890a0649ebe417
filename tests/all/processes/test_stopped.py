"""A process of the job that is stopped, whichever it is, is noticed, and the job ends."""

import os
import re
import signal
import subprocess

import psutil
import pytest

from tests.all.processes.runner import AS_ROOT, Runner, mpirun_python
from tests.limits import limit

pytestmark = pytest.mark.processes

HOST = os.uname().nodename
WAITING = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
LIMIT_S = str(limit(1.5))


def begin(runner: Runner, *options: str, script: str = WAITING) -> subprocess.Popen[str]:
    process = runner.start(
        *("-n", "2", "--grace", "1", *options, runner.script(script)), TORCHMN_HEARTBEAT_S=LIMIT_S
    )
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    return process


def scripts(runner: Runner) -> dict[int, psutil.Process]:
    """The scripts by their ranks."""
    found = {}
    for process in runner.processes("bootstrap.py"):
        env = process.environ()
        found[int(env.get("RANK") or env["OMPI_COMM_WORLD_RANK"])] = process
    return found


def end_of(process: subprocess.Popen[str], runner: Runner) -> str:
    _, err = process.communicate(timeout=limit(50))
    assert process.returncode == 1, err
    runner.wait_until_nothing_is_left()
    return err.splitlines()[-1]


def test_an_agent(runner: Runner, backend: str) -> None:
    process = begin(runner, "--backend", backend)
    agent = scripts(runner)[1].parent()
    assert agent is not None
    agent.suspend()
    summary = end_of(process, runner)
    assert summary.startswith(
        f"torchmn: rank 1 on {HOST} was lost: its agent (process {agent.pid}) is stopped by a "
    )


def test_a_rank_that_calls_no_collective(runner: Runner, backend: str) -> None:
    """As after its last one, or before it has joined."""
    process = begin(runner, "--backend", backend)
    script = scripts(runner)[1]
    script.suspend()
    summary = end_of(process, runner)
    assert f"rank 1 on {HOST} does not continue: its process {script.pid} is stopped by" in summary


@pytest.mark.usefixtures("needs_mpi")
def test_a_launcher(runner: Runner) -> None:
    process = begin(runner, "--backend", "mpi", "--launcher", "mpirun")
    (child,) = [p for p in psutil.Process(process.pid).children() if p.status() != "zombie"]
    child.suspend()
    summary = end_of(process, runner)
    assert re.search(rf"\(process {child.pid} on .*\) is stopped by a signal", summary)


def test_a_host_of_an_elastic_job(runner: Runner) -> None:
    """The job continues without the host, if there are others; here there are none."""
    words = ("--elastic", "1:1:60", "--max-restarts", "0")
    process = begin(runner, "--backend", "gloo", *words)
    (stopped,) = runner.processes("torchmn.run.elastic.host_main")
    stopped.suspend()
    assert process.stderr is not None
    words = "localhost was lost: its process has not answered for"
    assert any(words in line for line in process.stderr)
    process.terminate()
    process.communicate(timeout=limit(50))
    runner.wait_until_nothing_is_left()


MONITORED = """
import time, torchmn
from torchmn.run import install_crash_handler
comm = torchmn.create_communicator("naive")
install_crash_handler(comm)
comm.barrier()
print("ready", flush=True)
time.sleep(600)
"""


def start_under_mpirun(runner: Runner, script: str, **env: str) -> subprocess.Popen[str]:
    """Two ranks, without torchmn run."""
    return runner.start_command(*mpirun_python(2), runner.script(script), **AS_ROOT, **env)


@pytest.mark.parametrize("module", ["server", "rank_monitor", "script"])
def test_under_another_launcher(runner: Runner, module: str) -> None:
    process = start_under_mpirun(runner, MONITORED, TORCHMN_HEARTBEAT_S=LIMIT_S)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    assert not runner.processes("torchmn.control.mpi_start")
    (server,) = runner.processes("torchmn.run.monitor.server")
    runner.wait_until(
        lambda: [c.status for c in server.net_connections()].count("ESTABLISHED") == 2,
        "the monitors did not connect",
    )
    if module == "script":
        found = [p for p in runner.processes("script.py") if "mpirun" not in p.cmdline()[0]]
    else:
        found = runner.processes(f"torchmn.run.monitor.{module}")
    stopped = sorted(found, key=lambda p: p.pid)[-1]
    stopped.suspend()
    _, err = process.communicate(timeout=limit(50))
    assert process.returncode != 0
    words = {
        "server": "has lost the monitor server, which runs on the host of rank 0: it was killed or",
        "rank_monitor": f"was lost: its monitor (process {stopped.pid}) is stopped by a signal",
        "script": f"does not continue: its process {stopped.pid} is stopped by a signal",
    }
    assert words[module] in err
    if stopped.is_running():
        stopped.send_signal(signal.SIGCONT)
    runner.wait_until_nothing_is_left()


STOPPED_BEFORE_MPI = """
import os, signal, time, torchmn
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
torchmn.create_communicator("naive", transport="mpi", timeout_s=torchmn.Timeout(60, 60, limit(3)))
"""


def test_under_another_launcher_before_the_ranks_have_joined(runner: Runner) -> None:
    """`MPI_Init` has no time limit of its own, and no thread of the script runs meanwhile."""
    process = start_under_mpirun(runner, STOPPED_BEFORE_MPI)
    _, err = process.communicate(timeout=limit(50))
    assert process.returncode != 0
    assert re.search(
        rf"rank 1 on {HOST}: MPI_Init.* within {limit(3):g} s .*: rank 0 \(process \d+\) on this "
        "host is stopped by a signal",
        err,
    ), err
    runner.wait_until_nothing_is_left()
