"""What only Slurm has: `srun` as a launcher, and `torchmn run` in an allocation."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.all.schedulers import place
from tests.all.schedulers.cluster import MARKS, Cluster, running
from tests.all.schedulers.slurm import Slurm

pytestmark = MARKS

TWO_ON_EACH = ("-N", 2, "--ntasks-per-node", 2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(Slurm, tmp_path_factory.mktemp("slurm")) as started:
        yield started


def test_a_script_given_to_srun(cluster: Cluster, tmp_path: Path) -> None:
    command = ["srun", *TWO_ON_EACH, sys.executable, place.__file__, tmp_path]
    done = cluster.run(command, tmp_path, TORCHMN_TRANSPORT="torch")
    assert done.returncode == 0, done.stderr
    assert place.are_two_on_each(tmp_path), place.places(tmp_path)


def test_two_steps_at_once_do_not_meet(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    step = shlex.join(["srun", "--overlap", "-N2", "-n2", sys.executable, place.__file__])
    script = f"{step} a & {step} b & wait"
    done = cluster.run(["salloc", "-N", 2, "-n", 4, "sh", "-c", script], tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("a", "b"):
        assert [found[1:3] for found in place.places(tmp_path / name)] == [[0, 2], [1, 2]]


@pytest.mark.parametrize("launcher", ["auto", "mpirun"])
def test_torchmn_run_inside_of_an_allocation(
    cluster: Cluster, tmp_path: Path, launcher: str
) -> None:
    run = [sys.executable, "-m", "torchmn", "run", "--per-node", "2", "--launcher", launcher]
    command = ["salloc", *TWO_ON_EACH, *run, "--backend", "gloo", place.__file__, tmp_path]
    done = cluster.run(command, tmp_path)
    if launcher == "mpirun" and " " in sys.prefix:
        assert "--launcher mpirun: Open MPI does not quote" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert place.are_two_on_each(tmp_path), place.places(tmp_path)
    assert ("through srun" if launcher == "auto" else "through mpirun") in done.stderr


def test_worlds_of_one_are_refused_on_every_rank(cluster: Cluster, tmp_path: Path) -> None:
    """srun without the PMI that the MPI speaks gives every task a world of its own."""
    command = ["srun", "--mpi=none", "-N", 2, "-n", 2, sys.executable, place.__file__, tmp_path]
    done = cluster.run(command, tmp_path, TORCHMN_TRANSPORT="mpi", OMPI_MCA_btl="^ofi")
    assert done.returncode != 0
    assert done.stderr.count("but MPI.COMM_WORLD says rank 0 of 1") == 2
    assert "srun --mpi=pmix" in done.stderr
    assert place.places(tmp_path) == []
