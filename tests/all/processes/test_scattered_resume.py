"""A pass over a scattered loader that a signal ends is continued, on any number of ranks."""

import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.all.processes.runner import Runner
from tests.all.processes.scattered_script import (
    BATCH_SIZE,
    NUM_SAMPLES,
    NUM_STEPS,
    STOP_AFTER,
    one_process,
)
from tests.limits import limit

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).with_name("scattered_script.py"))
STEPS_OF_A_PASS = -(-NUM_SAMPLES // BATCH_SIZE)


def start(runner: Runner, num_ranks: int, num_workers: int, step_s: float) -> subprocess.Popen[str]:
    arguments = ("checkpoints", str(num_workers), str(step_s))
    return runner.start("-n", str(num_ranks), SCRIPT, *arguments)


def stop_in_a_pass(runner: Runner, num_ranks: int, num_workers: int, name: str) -> int:
    """Start a job and end it by a signal after some steps. Returns the status."""
    process = start(runner, num_ranks, num_workers, 0.2)
    assert process.stdout is not None
    for line in process.stdout:
        if f"ended step {STOP_AFTER}" in line:
            break
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=limit(60))
    assert "Traceback" not in err or name == "SIGINT", err
    runner.wait_until_nothing_is_left()
    return process.returncode


@pytest.mark.parametrize(
    ("first", "second", "num_workers", "name", "status"),
    [(2, 3, 0, "SIGTERM", 85), (3, 1, 2, "SIGTERM", 85), (2, 2, 2, "SIGINT", 130)],
)
def test_the_parameters_are_those_of_one_process_that_was_not_stopped(
    runner: Runner, first: int, second: int, num_workers: int, name: str, status: int
) -> None:
    """SIGTERM: saved where it was; Ctrl-C: continues from the last save in the same pass."""
    assert stop_in_a_pass(runner, first, num_workers, name) == status
    out, err = start(runner, second, num_workers, 0.0).communicate(timeout=limit(90))
    begins = {int(text) for text in re.findall(r"begins at (\d+)", out)}
    assert len(begins) == 1, out + err
    (begin,) = begins
    assert 3 <= begin < NUM_STEPS, err
    if name == "SIGTERM":
        assert begin >= STOP_AFTER
    assert begin % STEPS_OF_A_PASS, "stopped between two passes: nothing was continued"
    found = torch.load(runner.folder / "checkpoints" / "parameters.pt")
    for key, expected in one_process().items():
        torch.testing.assert_close(found[key], expected, rtol=1e-10, atol=1e-10)
