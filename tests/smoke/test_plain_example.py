"""An ordinary script and its seven changed lines: counted, and compared on three ranks."""

import ast
import difflib
import re
from pathlib import Path

import pytest
import torch

from tests.all.processes.test_examples import run

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "examples" / "plain" / "train.py"
PORTED = ROOT / "examples" / "plain" / "train_multi_node.py"
NUMBER = re.compile(r"\d+\.\d+|\d+")


def code_of(path: Path) -> list[str]:
    """The lines of a script that are not empty and not its docstring."""
    text = path.read_text()
    docstring = ast.parse(text).body[0]
    return [line for line in text.splitlines()[docstring.end_lineno :] if line.strip()]


def changed_lines() -> list[str]:
    """The lines of the ported script that the plain one has not; where one went, another came."""
    changes = [*difflib.ndiff(code_of(PLAIN), code_of(PORTED))]
    added = [line[2:].strip() for line in changes if line.startswith("+ ")]
    removed = [line[2:].strip() for line in changes if line.startswith("- ")]
    assert removed == ["torch.manual_seed(0)", "if options.save:"]
    return added


def test_seven_lines_differ_and_the_readme_shows_them() -> None:
    added = changed_lines()
    assert len(added) == 7, "\n".join(added)
    readme = (ROOT / "README.md").read_text()
    block = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    assert [int(number) for number in re.findall(r"# (\d)", block)] == [*range(1, 8)]
    shown = re.findall(r"(\w+)\(", block) + ["import torchmn", "comm.rank == 0"]
    for line in added:
        assert any(name in line for name in shown), line
    for name in re.findall(r"(?:torchmn|comm)\.(\w+)", block):
        assert any(name in line for line in added), name


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_losses_and_parameters_of_one_process(tmp_path: Path) -> None:
    options = ["--epochs", "3", "--batch-size", "60", "--save"]
    wanted, _ = run([PLAIN, *options, "plain.pt"], cwd=tmp_path)
    assert len(wanted) == 3
    parameters = torch.load(tmp_path / "plain.pt")
    launcher = ["-m", "torchmn", "run", "-n", "3"]  # the last batch of 20 samples: 7, 7 and 6
    lines, _ = run([*launcher, PORTED, *options, "ported.pt"], cwd=tmp_path)
    assert len(lines) == 3, "only rank 0 prints"
    for line, plain in zip(lines, wanted, strict=True):
        found, expected = ([float(x) for x in NUMBER.findall(text)] for text in (line, plain))
        assert found == pytest.approx(expected, abs=2e-5)
    for name, value in torch.load(tmp_path / "ported.pt").items():
        torch.testing.assert_close(value, parameters[name], rtol=1e-3, atol=1e-4)
