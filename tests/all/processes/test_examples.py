"""Every script of the examples trains on real digits for a few steps and leaves what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.limits import limit

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
HEADER = [
    "epoch",
    "main/loss",
    "validation/main/loss",
    "main/accuracy",
    "validation/main/accuracy",
    "images/s",
    "elapsed_time",
]
THROUGHPUT = re.compile(r"Throughput: ([0-9.]+) \[images/sec\.\] \(([0-9]+) / ([0-9.]+)\)")
TWO_STEPS = ["--dataset", "digits", "--model", "small", "--batchsize", "800", "--epoch", "1"]
NUM_IMAGES = 1437


def run(
    command: list[str | Path], *, exit_code: int = 0, cwd: Path = ROOT
) -> tuple[list[str], str]:
    """Lines of its output without the launcher's prefix, and its stderr."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=limit(170),
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return [re.sub(r"^\[\d\] ?", "", line) for line in done.stdout.splitlines()], done.stderr


def check_reports(lines: list[str], out: Path, *, num_epochs: int, num_iterations: int) -> None:
    """Table, throughput line and files."""
    [header] = [index for index, line in enumerate(lines) if line.split() == HEADER]
    rows = [line.split() for line in lines[header + 1 :] if re.match(r"\d", line)]
    assert [row[0] for row in rows] == [str(1 + epoch) for epoch in range(num_epochs)]
    assert all(len(row) == len(HEADER) for row in rows)
    found = THROUGHPUT.fullmatch(lines[-1])
    assert found is not None
    speed, images, seconds = map(float, found.groups())
    assert images == num_epochs * NUM_IMAGES
    assert speed == pytest.approx(images / seconds)
    log = json.loads((out / "log").read_text())
    assert log[-1]["iteration"] == num_iterations
    assert f"{log[-1]['validation/main/accuracy']:g}" == rows[-1][4]
    assert 0 < log[-1]["validation/main/accuracy"] <= 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    snapshot = torch.load(out / f"snapshot_iter_{num_iterations}", weights_only=True)
    assert snapshot["_start_iteration"] == num_iterations
    assert "predictor.classifier.0.weight" in snapshot["models"]["main"]


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_one_worker(tmp_path: Path) -> None:
    lines, _ = run([EXAMPLES / "cifar/train_cifar.py", *TWO_STEPS, "--out", tmp_path])
    assert lines[:4] == [
        "Start a training script using single CPU."
        if not torch.cuda.is_available()
        else "Start a training script using single GPU.",
        "# Minibatch-size: 800",
        "# epoch: 1",
        "Using digits dataset: scikit-learn",
    ]
    check_reports(lines, tmp_path, num_epochs=1, num_iterations=2)


def test_scripts_are_short() -> None:
    """Those that people copy. Three are whole workloads: with evaluation, search and recipes."""
    long = {"train_imagenet.py": 200, "seq2seq/train_seq2seq.py": 215, "lm/train_lora.py": 190}
    for script in [*EXAMPLES.glob("*/train_*.py"), *EXAMPLES.glob("cntk/*.py")]:
        limit = next((n for name, n in long.items() if script.match(name)), 120)
        assert len(script.read_text().splitlines()) < limit, script


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_seq2seq_on_two_ranks_equals_one_process() -> None:
    """On four ranks as two pairs as well; the loss falls."""
    script = EXAMPLES / "model_parallel" / "train_seq2seq.py"
    losses = {}
    for num_ranks in (1, 2, 4):
        command = ["-m", "torchmn", "run", "-n", str(num_ranks), "--backend", "gloo", script]
        lines, _ = run([*command, "--steps", "20", "--microbatches", "3"])
        found = [re.fullmatch(r"step (\d+): loss ([0-9.]+)", line) for line in lines]
        losses[num_ranks] = {int(m[1]): float(m[2]) for m in found if m}
    assert list(losses[1]) == [10, 20]
    assert losses[1][20] < losses[1][10] < 2.4
    for num_ranks in (2, 4):
        assert losses[num_ranks] == pytest.approx(losses[1], abs=1e-5)


def epoch_losses(lines: list[str]) -> list[float]:
    found = [re.match(r"epoch \d+: loss ([0-9.]+)", line) for line in lines]
    return [float(match.group(1)) for match in found if match]


DIGITS = ["--dataset", "digits", "--epoch", "2", "--units", "40"]


def launched(script: str, num_workers: int, *options: str) -> list[float]:
    command = ["-m", "torchmn", "run", "-n", str(num_workers), EXAMPLES / "model_parallel" / script]
    lines, _ = run([*command, *DIGITS, *options])
    losses = epoch_losses(lines)
    assert len(losses) == 2, lines
    return losses


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_data_and_model_parallelism_at_once() -> None:
    one = launched("train_mnist_dual.py", 1, "--model-workers", "1")
    assert launched("train_mnist_dual.py", 4) == pytest.approx(one, abs=5e-5)
    assert one[1] < one[0]


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_layers_divided_among_workers() -> None:
    one, three = (launched("train_mnist_split.py", n) for n in (1, 3))
    assert three == one
    assert one[1] < one[0]


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_mnist_script_with_two_workers(tmp_path: Path) -> None:
    launcher = ["-m", "torchmn", "run", "-n", "2", "--log-dir", tmp_path / "workers"]
    script = EXAMPLES / "mnist/train_mnist.py"
    options = [*TWO_STEPS, "--batchsize", "400", "--warmup", "0.5", "--out", tmp_path]
    lines, _ = run([*launcher, script, *options])
    assert lines[0] == "Num process (COMM_WORLD): 2"
    check_reports(lines, tmp_path, num_epochs=1, num_iterations=2)
