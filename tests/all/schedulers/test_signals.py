"""Slurm's warning signals: the ranks of a step save, and the job's status is 85."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.all.schedulers.cluster import MARKS, Cluster, running
from tests.all.schedulers.slurm import Slurm
from tests.limits import limit

pytestmark = MARKS

SCRIPT = """
import os, pathlib, signal, sys, time
rank, seen = os.environ["RANK"] if "RANK" in os.environ else os.environ["SLURM_PROCID"], []
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), lambda signum, _: seen.append(signal.Signals(signum).name))
pathlib.Path(f"ready{rank}").write_text(os.environ["SLURM_JOB_ID"])
while not seen:
    time.sleep(0.01)
time.sleep(1)
pathlib.Path(f"seen{rank}").write_text(seen[0])
sys.exit(85)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(Slurm, tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
@pytest.mark.parametrize("target", ["step", "launcher"])
def test_ranks_save_after_a_signal(
    cluster: Cluster, tmp_path: Path, name: str, target: str
) -> None:
    (tmp_path / "save.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "torchmn", "run", "--per-node", "1", "--launcher", "srun"]
    command = ["salloc", "-N", "2", "-n", "2", *run, "--backend", "gloo", "save.py"]
    process = cluster.login.popen(
        command, env=cluster.env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + limit(100)
    while len(ready := list(tmp_path.glob("ready*"))) < 2 or not all(p.read_text() for p in ready):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    if target == "step":
        step = f"{ready[0].read_text()}.0"
        assert cluster.run(["scancel", f"--signal={name[3:]}", step], tmp_path).returncode == 0
    else:
        (launcher,) = launchers_in(tmp_path)
        subprocess.run(["kill", f"-{name[3:]}", str(launcher)], check=True)
    out, err = process.communicate(timeout=limit(100))
    assert process.returncode == 85, (out, err)
    assert "all ranks checkpointed and exited" in err
    assert [path.read_text() for path in sorted(tmp_path.glob("seen*"))] == [name, name]


def launchers_in(folder: Path) -> list[int]:
    """The processes of ``torchmn run`` in this folder, on whatever host."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[1:4] == [b"-m", b"torchmn", b"run"] and (entry / "cwd").samefile(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
