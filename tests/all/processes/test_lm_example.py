"""The language model trains the same on any number of workers, and resumes in mid-block."""

import re
import shutil
from pathlib import Path

import pytest

from tests.all.processes.test_examples import EXAMPLES, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SMALL = ["--steps", "30", "--eval", "10", "--length", "16", "--layers", "1", "--width", "16",
         "--batchsize", "6"]  # fmt: skip


def losses(folder: Path, num_ranks: int, *options: str) -> dict[int, float]:
    """The validation losses that a run prints, by step."""
    launcher = ["-m", "torchmn", "run", "-n", str(num_ranks), "--backend", "gloo"]
    script = [EXAMPLES / "lm/train_lm.py", *SMALL, "--out", folder / "result", *options]
    lines, _ = run([*launcher, "--log-dir", folder / "logs", *script])
    found = re.findall(r"step (\d+): validation loss ([0-9.]+)", "\n".join(lines))
    return {int(step): float(loss) for step, loss in found}


def test_losses_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    one, *others = (
        losses(tmp_path / str(n), n, "--schedule", "every_step", "--learnrate", "0.01")
        for n in (1, 2, 3)
    )
    assert list(one) == [10, 20, 30]
    assert one[30] < one[10]
    for other in others:
        assert other == pytest.approx(one, abs=2e-5)


def test_it_resumes_within_a_block(tmp_path: Path) -> None:
    """Fragments of 8 bits under way, the outer momentum and the order of the text included."""
    options = ["--schedule", "streaming", "--codec", "int8", "--communicator", "flat",
               "--block", "8"]  # fmt: skip
    whole = losses(tmp_path, 2, *options)
    assert list(whole) == [10, 20, 30]
    for step in (20, 30):
        shutil.rmtree(tmp_path / "result" / "lm" / f"step-{step:08d}")
    assert losses(tmp_path, 2, *options) == {20: whole[20], 30: whole[30]}
