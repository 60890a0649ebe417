"""Tools around a loop: torch.compile, torchmetrics, trackers, Hydra, each in an example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frameworks.running import TORCHMN_RUN, TORCHRUN, need, start
from tests.frameworks.test_start import accuracy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "tools"
NUM_TESTED = 360


@pytest.mark.parametrize("tracker", ["print", "tensorboard", "mlflow", "wandb"])
def test_trackers(tmp_path: Path, tracker: str) -> None:
    """Rank 0 alone has one; metrics of torchmetrics are those of all ranks."""
    need("torchmetrics", *([] if tracker == "print" else [tracker]))
    text = start(
        *(EXAMPLES / "train_tools.py", "--tracker", tracker, "--out", tmp_path / "out"),
        by=TORCHMN_RUN,
        cwd=tmp_path,
        PYTHONWARNINGS="ignore",
        WANDB_SILENT="true",
    )
    assert accuracy(text.splitlines()[-1] if tracker == "print" else text) > 0.8
    assert f"of {NUM_TESTED}" in text, text
    if tracker == "tensorboard":
        assert len([*(tmp_path / "out").glob("events*")]) == 1


def test_compiled_and_in_one_process(tmp_path: Path) -> None:
    """Two ranks count the same samples as one, and learn the same."""
    need("torchmetrics")
    script = EXAMPLES / "train_tools.py"
    found = [
        accuracy(start(script, *words, by=by, cwd=tmp_path, TMPDIR=str(tmp_path)).splitlines()[-1])
        for by, words in ((TORCHMN_RUN, []), (TORCHMN_RUN, ["--compile"]), ((), []))
    ]
    assert max(found) - min(found) < 2 / NUM_TESTED, found


@pytest.mark.parametrize(
    "by", [TORCHMN_RUN, TORCHRUN, ()], ids=["torchmn run", "torchrun", "alone"]
)
def test_hydra(tmp_path: Path, by: tuple[str, ...]) -> None:
    need("hydra")
    text = start(EXAMPLES / "train_hydra.py", "learning_rate=0.1", by=by, cwd=tmp_path)
    (line,) = [line for line in text.splitlines() if "accuracy" in line]
    assert accuracy(line) > 0.8
    (folder,) = re.findall(r" in (\S+)", line)
    assert (Path(folder) / "model.pt").exists()
