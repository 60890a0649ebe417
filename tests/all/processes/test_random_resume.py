"""A run that is resumed draws the numbers of one that was not interrupted, on every rank."""

from pathlib import Path

import pytest

from tests.all.processes.test_examples import run

SCRIPT = Path(__file__).with_name("random_resume_script.py")


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_from_before_and_after_the_beginning_of_training(tmp_path: Path) -> None:
    lines, _ = run(["-m", "torchmn", "run", "-n", "2", SCRIPT, tmp_path])
    assert lines == ["resumed"]
