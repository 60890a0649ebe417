"""Every row of docs/reference/exit-status.md, under every launcher that is here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil
import pytest

from tests.netlab import missing_requirement, netlab
from tests.processes.exit_status import LAUNCHERS, PAGE, ROWS, Launcher, Row, table
from tests.processes.runner import MARK, PYTHON_PATH, Runner
from tests.schedulers.cluster import running
from tests.schedulers.slurm import Slurm
from torchmn.launch.backend import find_mpirun, this_machine

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SCRIPT = """
import os, pathlib, signal, sys, time
mode, seen = sys.argv[1], []

def note(signum, frame):
    seen.append(signal.Signals(signum).name)
    pathlib.Path(f"seen{rank}").write_text(" ".join(seen))
    if mode != "saves":
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)

for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"):
    signal.signal(getattr(signal, name), note)
pathlib.Path(f"ready{rank}").write_text(str(os.getpid()))
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


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where jobs of one launcher start: ``command`` before the script, and its variables."""

    launcher: Launcher
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    popen: Callable[..., subprocess.Popen[str]] = partial(subprocess.Popen, text=True)

    def start(self, runner: Runner, mode: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", **self.env}
        return self.popen(
            [*self.command, runner.script(SCRIPT), mode],
            env={**env, MARK: runner.mark},
            cwd=runner.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def torchmn_run(launcher: str, *options: str) -> Sequence[str]:
    run = (sys.executable, "-m", "torchmn", "run", "--log-dir", "logs", "--grace", "20")
    return (*run, "--launcher", launcher, *options)


@pytest.fixture(scope="module", params=LAUNCHERS)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Of the whole module, so that test hosts are there before a test that leaves nothing."""
    launcher: Launcher = request.param
    here, gloo = ("-n", "2"), ("--backend", "gloo")
    is_elsewhere = launcher == "srun" or launcher.startswith("plain")  # mostly of other programs
    if is_elsewhere and not os.environ.get("TORCHMN_TEST_LAUNCHERS"):
        pytest.skip(reason="'make test-launchers' runs these")
    if launcher in ("mpirun", "plain mpirun"):
        mpirun = find_mpirun(os.environ)
        if mpirun is None or this_machine(os.environ).missing_for_mpi:
            pytest.skip(reason="no MPI: install it with 'make setup'")
        command = torchmn_run("mpirun", "--backend", "mpi", *here)
        if launcher == "plain mpirun":
            command = (mpirun, "--oversubscribe", *here, sys.executable)
        yield Site(launcher=launcher, command=command, env=AS_ROOT)
    elif launcher == "plain torchrun":
        yield Site(launcher=launcher, command=TORCHRUN)
    elif launcher == "ssh":
        if missing := missing_requirement():
            pytest.skip(reason=f"no test hosts: {missing}")
        with netlab(2, None) as lab:
            yield Site(
                launcher=launcher,
                command=torchmn_run("ssh", *gloo, "--hosts", "n0:1,n1:1", "-x", MARK),
                env={"TORCHMN_RSH": str(lab.rsh_agent)},
                popen=lab.hosts[0].popen,
            )
    elif launcher == "srun":
        if missing := Slurm.why_not():
            pytest.skip(reason=missing)
        with running(Slurm, tmp_path_factory.mktemp("slurm")) as cluster:
            hosts = ",".join(f"{node.name}:1" for node in cluster.nodes)
            yield Site(
                launcher=launcher,
                command=torchmn_run("srun", *gloo, "--hosts", hosts, "-x", MARK),
                env={**cluster.env, "PYTHONPATH": PYTHON_PATH},
                popen=cluster.login.popen,
            )
    else:
        yield Site(launcher=launcher, command=torchmn_run(launcher, *gloo, *here))


def act(row: Row, process: subprocess.Popen[str], runner: Runner) -> None:
    """Send the signal of a row once all ranks are ready."""
    ready = [runner.folder / f"ready{rank}" for rank in range(2)]
    runner.wait_until(
        lambda: all(path.exists() and path.read_text() for path in ready),
        "the scripts did not start",
        limit_s=60,
    )
    scripts = [psutil.Process(int(path.read_text())) for path in ready]
    if row.target == "launcher":
        targets = [process.pid]
    elif row.target == "one script":
        targets = [scripts[1].pid]
    else:
        targets = [script.ppid() for script in scripts]
    for pid in targets:
        os.kill(pid, getattr(signal, row.signum))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_row(site: Site, row: Row, runner: Runner) -> None:
    if site.launcher not in row.statuses:
        pytest.skip(reason="not a row of the table")
    process = site.start(runner, row.script)
    if row.signum:
        act(row, process, runner)
    _, err = process.communicate(timeout=90)
    code = process.returncode
    assert (128 - code if code < 0 else code) == row.statuses[site.launcher], err
    seen = {path.name: path.read_text() for path in runner.folder.glob("seen*")}
    if row.sees.endswith(", once"):
        assert seen == dict.fromkeys(("seen0", "seen1"), row.sees.removesuffix(", once"))
    runner.wait_until_nothing_is_left()


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text()


def test_every_row_is_one_of_the_launcher_that_is_always_here() -> None:
    assert all("local" in row.statuses for row in ROWS)
    assert len({row.what for row in ROWS}) == len(ROWS)
