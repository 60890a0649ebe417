"""The folders for the segments of Open MPI and for the files of its mpirun."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchmn.run.backend import SESSION_VARIABLE, VARIABLES, open_mpi_memory, open_mpi_session

RANK = {"OMPI_COMM_WORLD_SIZE": "2"}


def test_the_folder_is_removed_with_what_is_in_it(tmp_path: Path) -> None:
    with open_mpi_memory(RANK, tmp_path) as variables:
        assert set(variables) == set(VARIABLES)
        (folder,) = set(map(Path, variables.values()))
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "sm_segment.n1.0.1.0").write_bytes(b"x")
        with open_mpi_memory(RANK, tmp_path) as others:  # that of the rank beside it
            assert set(others.values()) != set(variables.values())
        assert (folder / "sm_segment.n1.0.1.0").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_agent_is_removed_by_the_next(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from torchmn.run.backend import open_mpi_memory\n"
        "with open_mpi_memory({'OMPI_COMM_WORLD_SIZE': '2'}, Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    with open_mpi_memory(RANK, tmp_path) as variables:
        assert not left.exists()
        assert [str(path) for path in tmp_path.iterdir()] == list(set(variables.values()))


@pytest.mark.parametrize("env", [{}, {**RANK, VARIABLES[0]: "/tmp"}])
def test_nothing_is_changed_where_it_is_not_ours_to_choose(
    tmp_path: Path, env: dict[str, str]
) -> None:
    with open_mpi_memory(env, tmp_path) as variables:
        assert variables == {}
        assert list(tmp_path.iterdir()) == []


def test_mpirun_has_a_folder_of_its_own_unless_the_user_chose_one(tmp_path: Path) -> None:
    with open_mpi_session({}, tmp_path) as variables:
        (folder,) = tmp_path.iterdir()
        assert variables == {SESSION_VARIABLE: str(folder)}
        (folder / "pmix.vm.tool").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []
    with open_mpi_session({SESSION_VARIABLE: "/elsewhere"}, tmp_path) as variables:
        assert variables == {}
