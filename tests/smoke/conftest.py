"""The fixtures of all tests of processes: `tests/all/processes`."""

from tests.all.processes.conftest import (
    _own_temporary_folder,
    _quick_start,
    backend,
    needs_mpi,
    runner,
)

__all__ = ["_own_temporary_folder", "_quick_start", "backend", "needs_mpi", "runner"]
