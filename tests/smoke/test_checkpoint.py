"""Processes that are killed in the middle of a save."""

from pathlib import Path

import pytest

from tests.all.processes.test_checkpoint import Start, ancestor, check_kill, start

__all__ = ["ancestor", "start"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.mark.parametrize("event", ["between files", "in a file", "before the rename"])
def test_kill_in_the_middle(start: Start, tmp_path: Path, event: str) -> None:
    check_kill(start, tmp_path, event)
