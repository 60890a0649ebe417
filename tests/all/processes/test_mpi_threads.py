"""An MPI that the script has initialized: refused if a second thread may not call it."""

import subprocess
from pathlib import Path

import pytest

from tests.all.processes.runner import AS_ROOT, mpirun_python, run

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

SCRIPT = """
import sys
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
from mpi4py import MPI
import torchmn
from tests.contracts.suites.communicator_contracts import check_exactness, check_started_sums
from torchmn.cluster import Topology
comm = torchmn.create_communicator("hierarchical", topology=Topology.blocks([1, 1]))
check_exactness(comm)
check_started_sums(comm)
if len(sys.argv) > 2 and comm.rank == 1:
    raise ArithmeticError("one rank fails alone")
comm.finalize()
"""


def start(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = (*mpirun_python(2), tmp_path / "script.py", *arguments)
    return run(*command, OMP_NUM_THREADS="1", **AS_ROOT)


def test_a_level_below_serialized_is_refused(tmp_path: Path) -> None:
    assert start(tmp_path, "serialized").returncode == 0
    done = start(tmp_path, "funneled")
    assert done.returncode != 0
    assert "MPI was initialized below THREAD_SERIALIZED" in done.stderr


def test_a_rank_that_fails_ends_all_even_where_the_user_initialised_mpi(tmp_path: Path) -> None:
    done = start(tmp_path, "serialized", "fail")
    assert done.returncode != 0
    assert "one rank fails alone" in done.stderr
