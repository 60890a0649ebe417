"""An ordinary script and the one with seven changed lines, on three ranks: what both print.

`tests/project/test_beginning.py` counts the lines.
"""

import re
from pathlib import Path

import pytest
import torch

from tests.all.processes.test_examples import run

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "examples" / "plain" / "train.py"
PORTED = ROOT / "examples" / "plain" / "train_multi_node.py"
NUMBER = re.compile(r"\d+\.\d+|\d+")


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
