"""A session whose job is ended by a signal continues from its checkpoint, bit-equal."""

import functools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit
from torchmn.checkpoint.manifest import order_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).with_name("session_script.py")
NUM_MINIBATCHES = 229  # 1600 samples, 7 in each
Whole = tuple[list[Any], list[str]]  # what each rank has in the end, and what rank 0 has printed


def run(
    folder: Path, learner: str, name: str, strike: str = "", after: int = 0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchmn", "run", "-n", "2", "--log-dir", str(folder / "logs"),
         str(SCRIPT), str(folder / name), learner, str(folder / name), strike, str(after)],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        capture_output=True, text=True, timeout=limit(120), check=False,
    )  # fmt: skip


def results(folder: Path, name: str) -> list[Any]:
    return [torch.load(folder / f"{name}.rank{rank}", weights_only=True) for rank in range(2)]


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Of rank 0, without what depends on the clock."""
    found = [line[4:] for line in done.stdout.splitlines() if line.startswith("[0] ")]
    return [re.sub(r" [\d.]+s \(.*", "", line) for line in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """The same training without an end before its time, by learner."""

    @functools.cache
    def make(learner: str) -> Whole:
        folder = tmp_path_factory.mktemp("whole")
        done = run(folder, learner, "whole")
        assert done.returncode == 0, done.stderr
        return results(folder, "whole"), lines(done)

    return make


@pytest.mark.parametrize(
    ("learner", "strike", "status"), [("1bit", "SIGKILL", 137), ("block", "SIGTERM", 85)]
)
def test_a_session_that_is_ended_continues_with_the_same_bits(
    whole: Callable[[str], Whole], tmp_path: Path, learner: str, strike: str, status: int
) -> None:
    """By a lost process, and by the scheduler, which saves where it ends."""
    expected, printed = whole(learner)
    after = random.Random(strike).randrange(60, NUM_MINIBATCHES - 70)
    ended = run(tmp_path, learner, "again", strike, after)
    assert ended.returncode == status, ended.stderr
    assert not list(tmp_path.glob("again.rank*"))
    assert ("saved and exited: received SIGTERM" in ended.stderr) == (strike == "SIGTERM")
    if strike == "SIGTERM":  # no minibatch is repeated
        names = [path.name for path in (tmp_path / "again" / "model").iterdir()]
        _, step = max(map(order_of, names))  # "step-00000100-2" where it was just saved before
        assert step >= after
    done = run(tmp_path, learner, "again")
    assert done.returncode == 0, done.stderr

    for one, other in zip(expected, results(tmp_path, "again"), strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1:] == other[1:] == (one[1], NUM_MINIBATCHES)
    restored, *continued = lines(done)
    assert restored.startswith("Restoring training session from the checkpoint")
    assert continued
    assert continued == printed[-len(continued) :]  # also the numbers of epochs
