"""The script of docs/how-to/one-machine-with-gpus.md, and the output that the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.all.gpu.ranks import own_nccl
from tests.all.processes.runner import MARK, PYTHON_PATH, Runner
from tests.limits import limit
from tests.project.snippets import blocks

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240)]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "one-machine-with-gpus.md"
LINE = re.compile(r"epoch (\d) +loss ([\d.]+) +accuracy ([\d.]+)")
Lines = list[tuple[float, ...]]


def trained(runner: Runner, folder: str, *words: str, **variables: str) -> Lines:
    """Run the script of the page in a folder of its own; returns the numbers that it prints."""
    place = runner.folder / folder
    place.mkdir(exist_ok=True)
    text = next(block.text for block in blocks(PAGE) if block.file == "train_gpu.py")
    (place / "train_gpu.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": PYTHON_PATH, MARK: runner.mark, **variables}
    done = subprocess.run(
        [sys.executable, *words, "train_gpu.py"],
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        timeout=limit(200),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [tuple(map(float, found)) for found in LINE.findall(done.stdout)]


def check(one: Lines, two: Lines) -> None:
    (shown,) = [LINE.findall(b.text) for b in blocks(PAGE) if b.language == "text"]
    assert len(one) == len(two) == len(shown) == 4
    for own, other, line in zip(one, two, shown, strict=True):
        assert other == pytest.approx(own, abs=2e-2)  # products in bfloat16
        assert tuple(map(float, line)) == pytest.approx(own, abs=5e-2)


def test_one_process_and_two_ranks_print_what_the_page_shows(runner: Runner) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    one = trained(runner, "one", **hidden)
    words = ("-m", "torchmn", "run", "-n", "2")
    check(one, trained(runner, "two", *words, **hidden))
    assert trained(runner, "two", *words, **hidden) == []  # it has ended


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_gpus(runner: Runner) -> None:
    compiles = {"PYTHONPATH": os.pathsep.join(PYTHON_PATH.split(os.pathsep)[1:])}
    one = trained(runner, "one", **compiles)
    words = ("-m", "torchmn", "run", "-n", "2", "--backend", "nccl")
    compiles |= own_nccl()
    check(one, trained(runner, "two", *words, TORCHMN_SHARE_GPU="1", **compiles))
