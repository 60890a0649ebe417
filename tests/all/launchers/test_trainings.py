"""Whole trainings under MPICH's own mpiexec, against one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.all.launchers.ways import MPICH, ROOT, no_mpich
from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit

pytestmark = [
    pytest.mark.processes,
    pytest.mark.mpi,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not os.environ.get("TORCHMN_TEST_LAUNCHERS"), reason="'make test-launchers' runs these"
    ),
]

LANGUAGE_MODEL = ROOT / "examples" / "lm" / "train_lm.py"
SESSION = ROOT / "tests" / "all" / "processes" / "session_script.py"


@pytest.fixture(autouse=True)
def _with_mpich() -> None:
    if reason := no_mpich():
        pytest.skip(reason=reason)


def run(num_ranks: int, script: Path, *options: object) -> str:
    """What a script prints: on one rank without a launcher, with the Python of the tests."""
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher = [str(MPICH / "mpiexec"), "-n", str(num_ranks), str(MPICH / "python")]
    left = ("SLURM_", "OMPI_", "PMI", "TORCHMN_TRANSPORT", "MASTER_")
    env = {name: text for name, text in os.environ.items() if not name.startswith(left)}
    done = subprocess.run(
        [*launcher, str(script), *map(str, options)],
        env={**env, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit(200),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def validation_losses(output: str) -> dict[int, float]:
    found = re.findall(r"step (\d+): validation loss ([0-9.]+)", output)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_language_model(tmp_path: Path, num_ranks: int) -> None:
    small = ["--steps", 30, "--eval", 10, "--length", 16, "--layers", 1, "--width", 16]
    small += ["--batchsize", 6, "--schedule", "every_step", "--learnrate", 0.01]
    one, two = (
        validation_losses(run(n, LANGUAGE_MODEL, *small, "--out", tmp_path / str(n)))
        for n in (1, num_ranks)
    )
    assert list(one) == [10, 20, 30]
    assert one[30] < one[10]
    assert two == pytest.approx(one, abs=2e-5)


def test_a_training_session_of_cntk(tmp_path: Path) -> None:
    found = []
    for n in (1, 2):
        name = tmp_path / f"of {n}"
        run(n, SESSION, name, "plain", name, "", 0)
        found.append([torch.load(f"{name}.rank{rank}", weights_only=True) for rank in range(n)])
    (alone,), (first, second) = found
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    torch.testing.assert_close(first[0], alone[0])
    assert first[1:] == (pytest.approx(alone[1]), alone[2])
