"""The same script under a real Slurm's srun, by itself and through `torchmn run`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.all.launchers.test_one_script import (
    SAVES_LAST,
    SCRIPT,
    expected,
    pytestmark,
    raise_if_different,
)
from tests.all.launchers.ways import NUM_RANKS
from tests.all.schedulers.cluster import Cluster, running
from tests.all.schedulers.slurm import Slurm

__all__ = ["expected", "pytestmark"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := Slurm.why_not():
        pytest.skip(reason=reason)
    with running(Slurm, tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("name", ["srun", "torchmn run, srun"])
def test_the_same_losses_under_srun(
    cluster: Cluster,
    expected: tuple[list[float], list[float]],
    tmp_path: Path,
    name: str,
    num_hosts: int,
) -> None:
    output = output_of(cluster, tmp_path, name, num_hosts, SCRIPT)
    raise_if_different(name, num_hosts, "torch.distributed", output, expected)


@pytest.mark.parametrize("name", ["srun", "torchmn run, srun"])
def test_rank_0_saves_for_a_minute_after_the_others_have_ended(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    output_of(cluster, tmp_path, name, 2, SAVES_LAST)
    assert (tmp_path / "saved").exists()


def output_of(cluster: Cluster, folder: Path, name: str, num_hosts: int, text: str) -> str:
    """Run a script on the first hosts of the cluster; what it prints."""
    script = folder / "script.py"
    script.write_text(text)
    per_host = NUM_RANKS // num_hosts
    if name == "srun":
        command = ["srun", "--overcommit", "-N", num_hosts, "--ntasks-per-node", per_host]
        command += [sys.executable, script]
    else:
        hosts = ",".join(f"{node.name}:{per_host}" for node in cluster.nodes[:num_hosts])
        command = [sys.executable, "-m", "torchmn", "run", "--launcher", "srun", "--hosts", hosts]
        command += ["--launcher-args=--overcommit", "--backend", "gloo", script]
    done = cluster.run(command, folder, timeout_s=150, HOME=str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout
