"""The code of the tutorial is one script, which trains the same on one worker and on two."""

import re
from pathlib import Path

import pytest

from tests.all.processes.runner import Runner

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[3] / "docs" / "tutorial" / "from-one-worker-to-many.md"
OUTCOME = re.compile(r"(batch .*?) +loss ([\d.]+), ([\d.]+) %, (\d+) steps")


def script(text: str, num_epochs: int) -> str:
    """All blocks of the page, with fewer epochs."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    short, number = re.subn(r"(EPOCHS = 32, [\d.]+), \d+", rf"\1, {num_epochs}", "\n".join(blocks))
    assert number == 1
    return short


def outcomes(runner: Runner, num_ranks: int) -> dict[str, tuple[float, float, int]]:
    name = runner.script(script(PAGE.read_text(), 2))
    done = runner.run("-n", str(num_ranks), "--backend", "gloo", name, limit_s=140)
    assert done.returncode == 0, done.stdout + done.stderr
    found = OUTCOME.findall(done.stdout)
    return {label: (float(a), float(b), int(n)) for label, a, b, n in found}


def test_all_code_runs_and_the_number_of_workers_changes_nothing(runner: Runner) -> None:
    one, two = outcomes(runner, 1), outcomes(runner, 2)
    printed = {label for label, *_ in OUTCOME.findall(PAGE.read_text())}
    assert one.keys() == two.keys() == printed
    for label, (loss, accuracy, num_steps) in one.items():
        assert two[label][0] == pytest.approx(loss, rel=1e-3, abs=1e-4), label
        assert two[label][1] == pytest.approx(accuracy, abs=0.3), label  # two images
        assert two[label][2] == num_steps
