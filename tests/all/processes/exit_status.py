"""The table of docs/reference/exit-status.md: what happens to a job, and its exit status.

`tests/smoke` and `tests/all` have a test of each entry: `cases` divides them.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import psutil
import pytest

from tests.all.processes.runner import (
    AS_ROOT,
    MARK,
    PYTHON_PATH,
    Runner,
    mpirun_python,
    skip_without_mpi,
)
from tests.all.schedulers.cluster import running
from tests.all.schedulers.slurm import Slurm
from tests.limits import limit
from tests.netlab import missing_requirement, netlab

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "exit-status.md"
Launcher = Literal["local", "ssh", "mpirun", "srun", "plain mpirun", "plain torchrun"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
"""The columns of the page."""


@dataclass(frozen=True)
class Row:
    """One thing that happens. ``script`` is the mode of the script of the test.

    ``signum`` is sent to ``target``; ``statuses`` are those of the launchers that are tested.
    """

    what: str
    sees: str
    script: Literal["ends", "exits", "raises", "waits", "saves"]
    statuses: Mapping[Launcher, int]
    signum: str = ""
    target: Literal["launcher", "agents", "one script"] = "launcher"


def same(status: int, **others: int) -> dict[Launcher, int]:
    """The same status under all launchers but these; 0 or more where it differs."""
    named = {name.replace("_", " "): code for name, code in others.items()}
    return {name: named.get(name, status) for name in LAUNCHERS if named.get(name, 0) >= 0}


ROWS = (
    Row("All ranks end", "-", "ends", same(0)),
    Row("A rank exits with status 3", "the others: SIGTERM", "exits", same(3, plain_torchrun=1)),
    Row("A rank raises an exception", "the others: SIGTERM", "raises", same(1)),
    Row(
        "A rank is ended by SIGKILL",
        "the others: SIGTERM",
        "waits",
        same(137, plain_torchrun=1),
        signum="SIGKILL",
        target="one script",
    ),
    Row(
        "SIGTERM to the launcher",
        "SIGTERM, once",
        "waits",
        same(143, plain_mpirun=1, plain_torchrun=1),
        signum="SIGTERM",
    ),
    Row(
        "SIGTERM to the launcher, the ranks save",
        "SIGTERM, once",
        "saves",
        same(85, plain_mpirun=1, plain_torchrun=1),
        signum="SIGTERM",
    ),
    Row(
        "SIGUSR1 to the launcher, the ranks save",
        "SIGUSR1, once",
        "saves",
        same(85, plain_torchrun=-1),
        signum="SIGUSR1",
    ),
    Row(
        "SIGTERM to the agents, as from a scheduler's step, the ranks save",
        "SIGTERM, once",
        "saves",
        same(85, plain_mpirun=-1, plain_torchrun=-1),
        signum="SIGTERM",
        target="agents",
    ),
    Row(
        "SIGUSR2 to the agents, as from a scheduler's step, the ranks save",
        "SIGUSR2, once",
        "saves",
        same(85, plain_mpirun=-1, plain_torchrun=-1),
        signum="SIGUSR2",
        target="agents",
    ),
    Row(
        "SIGINT to the launcher (Ctrl-C)",
        "SIGINT",
        "waits",
        same(130, plain_mpirun=1, plain_torchrun=1),
        signum="SIGINT",
    ),
    Row(
        "SIGHUP to the launcher",
        "SIGTERM",
        "waits",
        same(129, plain_mpirun=-1, plain_torchrun=1),
        signum="SIGHUP",
    ),
    Row(
        "SIGKILL to the launcher",
        "SIGTERM",
        "saves",
        same(137, plain_mpirun=-1, plain_torchrun=-1),
        signum="SIGKILL",
    ),
)


def table() -> str:
    """The table of the page."""
    lines = [f"| what happens | the script sees | {' | '.join(LAUNCHERS)} |"]
    lines.append("|---" * (len(LAUNCHERS) + 2) + "|")
    for row in ROWS:
        codes = [str(row.statuses.get(name, "")) for name in LAUNCHERS]
        lines.append(f"| {row.what} | {row.sees} | {' | '.join(codes)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

# What happens under the launchers that need no hosts in `tests/smoke`.
IN_SMOKE = ("All ranks end", "A rank raises an exception", "SIGTERM to the launcher")


def _is_in_smoke(launcher: Launcher, row: Row) -> bool:
    return row.what in IN_SMOKE and launcher not in ("ssh", "srun")


def cases(*, in_smoke: bool) -> list[object]:
    """The entries of the table that one of the two folders tests: launchers and rows."""
    elsewhere = pytest.mark.skipif(
        not in_smoke and not os.environ.get("TORCHMN_TEST_LAUNCHERS"),
        reason="'make test-launchers' runs these",  # mostly of other programs
    )
    return [
        pytest.param(
            *(launcher, row),
            id=f"{launcher}-{row.what}",
            marks=elsewhere if launcher == "srun" or launcher.startswith("plain") else (),
        )
        for launcher in LAUNCHERS
        for row in ROWS
        if launcher in row.statuses
        if _is_in_smoke(launcher, row) == in_smoke
    ]


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


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def torchmn_run(launcher: str, *options: str) -> Sequence[str]:
    run = (sys.executable, "-m", "torchmn", "run", "--log-dir", "logs", "--grace", "20")
    return (*run, "--launcher", launcher, *options)


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Starts the hosts that a launcher needs. Skips where it is not here.

    Of the whole module, so that test hosts are there before a test that leaves nothing.
    """
    launcher: Launcher = request.param
    here, gloo = ("-n", "2"), ("--backend", "gloo")
    if launcher == "mpirun":
        skip_without_mpi()
        yield Site(launcher=launcher, command=torchmn_run("mpirun", "--backend", "mpi", *here))
    elif launcher == "plain mpirun":
        yield Site(launcher=launcher, command=mpirun_python(2), env=AS_ROOT)
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
        with running(Slurm, tmp_path_factory.mktemp("site")) as cluster:
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


def check(row: Row, site: Site, runner: Runner) -> None:
    """Start a job, do what the row says, and compare the exit status and what ranks have seen."""
    process = site.start(runner, row.script)
    if row.signum:
        act(row, process, runner)
    _, err = process.communicate(timeout=limit(90))
    code = process.returncode
    assert (128 - code if code < 0 else code) == row.statuses[site.launcher], err
    seen = {path.name: path.read_text() for path in runner.folder.glob("seen*")}
    if row.sees.endswith(", once"):
        name = row.sees.removesuffix(", once")
        if site.launcher == "plain mpirun":
            # It kills ranks soon after the signal, and the other one when one has ended: on a busy
            # machine their handlers have not run by then, or have not written all.
            assert {*seen.values()} <= {name, ""}
        else:
            assert seen == dict.fromkeys(("seen0", "seen1"), name)
    runner.wait_until_nothing_is_left()
