"""A round of an elastic job after a rank was killed."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.all.processes.test_elastic import _ends_runs, begin, left_of

__all__ = ["_ends_runs"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_a_killed_worker_on_one_machine(tmp_path: Path) -> None:
    """All start again and continue from the last copy in memory; the second time it is too much.

    The checkpoint folder is theirs again, without a word about the rank 0 that was killed.
    """
    words = ("--elastic", "1:1", "-n", "2", "--max-restarts", "1")
    run = begin(None, tmp_path, *words, script=(0.02, 5, 0))
    run.wait_for("[0] step 12")
    os.kill(run.worker(0), signal.SIGKILL)
    run.wait_for("in round 2")
    first = run.steps_of(1)[-1]
    run.wait_for("[0] step 40")
    os.kill(run.worker(1, number=2), signal.SIGKILL)
    assert run.end() == 128 + signal.SIGKILL
    assert "taken over" not in run.text
    again = run.steps_of(2)[0]
    bound = [file.read_text() for file in tmp_path.rglob("binding.txt")]
    for rank in (0, 1):
        assert len(re.findall(rf"rank {rank} on .*: cores? \d", "".join(bound))) == 2
    assert first - 5 <= again <= first + 1
    assert again % 5 == 1
    assert "rank 0 on" in run.text
    assert "restart 1 of 1: continuing with 2 ranks on localhost" in run.text
    assert "all 1 restarts are used up" in run.lines[-1]
    assert re.search(r"rank 1 on .* was ended by SIGKILL", run.lines[-1])
    assert left_of(run) == []
