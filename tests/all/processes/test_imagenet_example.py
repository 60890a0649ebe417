"""The ImageNet example on real photos: any number of workers, and jobs that are ended."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit
from tests.unit.examples.datasets.makers import unpack_flowers

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples/imagenet/train_imagenet.py"
OPTIONS = ["--recipe", "document", "--arch", "resnet18", "--model-width", "8", "--cpu"]
OPTIONS += ["--image-size", "64", "--epochs", "2", "--global-batch", "8", "--batchsize", "8"]
OPTIONS += ["--batch-norm", "all", "--workers", "0", "--learnrate", "0.5", "--log-steps", "1"]
OPTIONS += ["--save-steps", "2", "--check", "0.001"]  # checks in each step: these are fast
EPOCH_STEPS, NUM_STEPS = 12, 24  # 100 photos, of which 4 are left out of each epoch


@pytest.fixture(scope="module")
def flowers(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    return unpack_flowers(real_data, tmp_path_factory.mktemp("flowers"), train=20, val=5)


@pytest.fixture(scope="module")
def two_workers(flowers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train(flowers, out, 2)
    return out


def start(flowers: Path, out: Path, num_workers: int, *options: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torchmn", "run", "-n", str(num_workers)]
    launcher += ["--log-dir", str(out / "workers"), str(SCRIPT), str(flowers)]
    return subprocess.Popen(
        [*launcher, *OPTIONS, "--out", str(out), *options],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(flowers: Path, out: Path, num_workers: int, *options: str) -> str:
    with start(flowers, out, num_workers, *options) as process:
        printed, _ = process.communicate(timeout=limit(100))
    assert process.returncode == 0, printed
    return printed


def log(out: Path) -> dict[tuple[Any, ...], dict[str, float]]:
    """The last line of each step and of each epoch, without what depends on the clock."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("photos/s", None)
    return {(row.pop("step"), row.pop("epoch", None)): row for row in rows}


def test_the_curves_do_not_depend_on_the_number_of_workers(
    flowers: Path, two_workers: Path, tmp_path: Path
) -> None:
    train(flowers, tmp_path, 4)
    expected, found = log(two_workers), log(tmp_path)
    assert list(expected) == list(found)
    assert len(expected) == NUM_STEPS + 2
    for place, row in expected.items():
        if place[0] <= 12:  # rounding grows from step to step
            assert found[place] == pytest.approx(row, rel=1e-4)


@pytest.mark.parametrize(("name", "status"), [("SIGKILL", 137), ("SIGTERM", 85)])
def test_a_job_that_is_ended_in_an_epoch_continues_with_the_same_bits(
    flowers: Path, two_workers: Path, tmp_path: Path, name: str, status: int
) -> None:
    printed = []
    with start(flowers, tmp_path, 2) as process:
        for line in process.stdout or ():
            printed.append(line)
            if '"step": 5,' in line and len(printed) < 20:
                ranks = psutil.Process(process.pid).children(recursive=True)
                [*_, last] = [p for p in ranks if SCRIPT.name in " ".join(p.cmdline())]
                last.send_signal(signal.Signals[name])
    assert process.returncode == status, "".join(printed)
    assert not (tmp_path / "weights.pt").exists()
    [first] = re.findall(r"from step (\d+)", train(flowers, tmp_path, 2))
    assert 2 <= int(first) < NUM_STEPS
    if name == "SIGTERM":
        assert "saved and exited: received SIGTERM" in "".join(printed)
        assert int(first) >= 5
    else:
        assert int(first) < EPOCH_STEPS  # within an epoch
    assert log(tmp_path) == log(two_workers)
    one, other = (
        torch.load(out / "weights.pt", weights_only=True) for out in (tmp_path, two_workers)
    )
    assert list(one) == list(other)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_modern_recipe_with_readers_in_processes(flowers: Path, tmp_path: Path) -> None:
    """Averaged weights, bfloat16, passes of several photos; then its weights are evaluated."""
    options = "--recipe modern --batch-norm local --batchsize 2 --workers 1 --ema 0.9 --epochs 1"
    train(flowers, tmp_path, 2, *options.split())
    [*_, last] = log(tmp_path).values()
    assert 0 <= last["validation/top-1"] <= last["validation/top-5"] == 1
    weights = ["--weights", str(tmp_path / "weights.pt"), "--evaluate", "--bf16"]
    printed = train(flowers, tmp_path / "again", 1, *weights)
    [line] = [line for line in printed.splitlines() if "validation/loss" in line]
    again = json.loads(line.partition("] ")[2])
    assert again == pytest.approx(last, rel=0.02)
