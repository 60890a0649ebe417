"""What a test of a unit starts begins as a rank of `tests/all/processes` does."""

from tests.all.processes.conftest import _quick_start

__all__ = ["_quick_start"]
