"""A job whose rank is killed continues from its checkpoint, bit-equal to one never stopped."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.contracts.suites.resume_contracts import described
from tests.limits import limit

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("resume_script.py")
NUM_STEPS = 14


def run(folder: Path, schedule: str, codec: str, name: str, kill_at: int = -1, n: int = 2):  # type: ignore[no-untyped-def]
    where = folder / ("straight" if name == "straight" else "broken")
    return subprocess.run(
        [sys.executable, "-m", "torchmn", "run", "-n", str(n), str(SCRIPT), str(where), schedule,
         codec, str(folder / name), str(kill_at)],
        capture_output=True, text=True, timeout=limit(100), check=False,
    )  # fmt: skip


def results(folder: Path, name: str, num_ranks: int = 2):  # type: ignore[no-untyped-def]
    return [torch.load(folder / f"{name}.rank{r}", weights_only=True) for r in range(num_ranks)]


def beginnings(done: subprocess.CompletedProcess[str]) -> list[int]:
    return [int(line.split()[-1]) for line in done.stdout.splitlines() if "begins at" in line]


def flat(value: object) -> list[object]:
    """Tensors and numbers of a nested state, in order."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in flat(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("schedule", "codec"), [("every_step", "1bit"), ("diloco", "int8")])
def test_a_killed_job_ends_with_the_same_bits(tmp_path: Path, schedule: str, codec: str) -> None:
    """Killed at a random step; with dropout, batch normalization, Adam."""
    straight = run(tmp_path, schedule, codec, "straight")
    assert straight.returncode == 0, straight.stderr
    # From the save of step 5 on, that of step 2 is known to be written.
    kill_at = random.Random(f"{schedule} {codec}").randrange(6, NUM_STEPS)
    assert run(tmp_path, schedule, codec, "again", kill_at).returncode != 0
    assert not list(tmp_path.glob("again.rank*"))
    done = run(tmp_path, schedule, codec, "again")
    assert done.returncode == 0, done.stderr
    assert beginnings(done) in ([step, step] for step in range(2, kill_at + 1, 3))
    for expected, got in zip(
        results(tmp_path, "straight"), results(tmp_path, "again"), strict=True
    ):
        wanted, found = flat(described(expected)), flat(described(got))
        assert len(wanted) == len(found)
        for a, b in zip(wanted, found, strict=True):
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            assert same, (a, b)


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_a_killed_job_continues_with_one_rank_less(tmp_path: Path) -> None:
    assert run(tmp_path, "diloco", "int8", "again", kill_at=9, n=3).returncode != 0
    done = run(tmp_path, "diloco", "int8", "again", n=2)
    assert done.returncode == 0, done.stderr
    assert beginnings(done) in ([2, 2], [5, 5], [8, 8])
    assert "running statistics" in done.stderr  # what does not hold is reported
    first, second = results(tmp_path, "again")
    assert all(value.isfinite().all() for value in first[0].values())
    samples = [state["torchmn"]["num_samples"] for _, state in (first, second)]
    assert samples[0] == samples[1] > 0
