"""An MPI that the script has initialized: refused if a second thread may not call it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.all.processes.runner import AS_ROOT, PYTHON_PATH
from torchmn.run.backend import find_mpirun

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


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    mpirun = find_mpirun(os.environ)
    if mpirun is None:
        pytest.skip(reason="no mpirun: install it with 'make setup'")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_btl": "^ofi", **AS_ROOT}
    env["PYTHONPATH"] = PYTHON_PATH
    command = [mpirun, "-n", "2", "--map-by", ":OVERSUBSCRIBE", sys.executable, str(script)]
    return subprocess.run([*command, *arguments], env=env, capture_output=True, text=True)


@pytest.mark.mpi
@pytest.mark.processes
def test_a_level_below_serialized_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "serialized").returncode == 0
    done = run(tmp_path, "funneled")
    assert done.returncode != 0
    assert "MPI was initialized below THREAD_SERIALIZED" in done.stderr


@pytest.mark.mpi
@pytest.mark.processes
def test_a_rank_that_fails_ends_all_even_where_the_user_initialised_mpi(tmp_path: Path) -> None:
    done = run(tmp_path, "serialized", "fail")
    assert done.returncode != 0
    assert "one rank fails alone" in done.stderr
