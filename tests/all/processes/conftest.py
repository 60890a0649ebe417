"""What the tests of processes share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.all.processes.runner import PYTHON_PATH, Runner, skip_without_mpi
from tests.netlab import Lab, missing_requirement, netlab


@pytest.fixture(autouse=True)
def _own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For the processes of the test: those that it kills leave files that a later one may find.

    An mpirun with the process id of one that was killed does not start beside its files.
    """
    folder = tempfile.mkdtemp(prefix="t")  # short: sockets are in it
    monkeypatch.setenv("TMPDIR", folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the Pythons of the test: without what of torch they do not need."""
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)


@pytest.fixture(params=["gloo", "mpi"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "mpi":
        skip_without_mpi()
    return str(request.param)


@pytest.fixture
def needs_mpi() -> None:
    skip_without_mpi()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two hosts for all tests of a module."""
    if missing := missing_requirement():
        pytest.skip(reason=f"no test hosts: {missing}")
    with netlab(2, None) as made:
        yield made


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    left = [(process, process.cmdline()) for process in runner.processes()]
    for process, _ in left:
        process.kill()
    runner.close()
    assert not left, f"the job left processes: {[words for _, words in left]}"
