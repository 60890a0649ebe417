"""The first training: one process and two ranks print what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.all.processes.runner import MARK, PYTHON_PATH, Runner
from tests.project.snippets import blocks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "first-training.md"
LINE = re.compile(r"epoch (\d): training loss ([\d.]+), test loss ([\d.]+), accuracy (\d+)/397")


def test_one_process_and_two_ranks_print_what_the_page_shows(runner: Runner) -> None:
    own = blocks(PAGE)
    (runner.folder / "train.py").write_text(next(b.text for b in own if b.file == "train.py"))
    (shell,) = [b.text for b in own if b.language == "sh" and b.reason_not_to_run is None]
    (shown,) = [LINE.findall(b.text) for b in own if b.info == ""]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": PYTHON_PATH, MARK: runner.mark}
    outputs = []
    for command in shell.splitlines():
        done = subprocess.run(
            ["bash", "-c", command], cwd=runner.folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append([tuple(map(float, found)) for found in LINE.findall(done.stdout)])
    one, two = outputs
    assert len(one) == len(two) == len(shown) == 5
    for own_line, other, line in zip(one, two, shown, strict=True):
        assert other == pytest.approx(own_line, abs=2e-3)
        assert tuple(map(float, line)) == pytest.approx(own_line, rel=0.02, abs=2e-2)  # elsewhere
