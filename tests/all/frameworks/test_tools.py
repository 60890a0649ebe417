"""Tools around a loop: torch.compile, torchmetrics, trackers, Hydra, each in an example."""

import ast
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.all.frameworks.running import TORCHMN_RUN, need, start
from tests.all.frameworks.test_start import accuracy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[3] / "examples" / "tools"
NUM_TESTED, NUM_EPOCHS = 360, 3


@pytest.mark.parametrize("tracker", ["print", "mlflow"])
def test_trackers(tmp_path: Path, tracker: str) -> None:
    """One run, that of rank 0, which holds the numbers that one process logs."""
    need("torchmetrics", *([] if tracker == "print" else [tracker]))
    logged = []
    for number, by in enumerate(((), TORCHMN_RUN), start=1):
        out = tmp_path / f"of {number}"
        text = start(
            *(EXAMPLES / "train_tools.py", "--tracker", tracker, "--out", out),
            by=by,
            cwd=tmp_path,
            PYTHONWARNINGS="ignore",
        )
        assert "Traceback" not in text
        logged.append(LOGGED[tracker](out, text))
    alone, on_ranks = logged
    assert [step["number"] for step in on_ranks] == [NUM_TESTED] * NUM_EPOCHS
    for step, wanted in zip(on_ranks, alone, strict=True):
        assert step.keys() == wanted.keys()
        assert step["number"] == wanted["number"]
        assert step["accuracy"] == pytest.approx(wanted["accuracy"], abs=1.5 / NUM_TESTED)
    assert on_ranks[-1]["accuracy"] > 0.8


def printed(out: Path, text: str) -> list[dict[str, float]]:
    return [ast.literal_eval(values) for values in re.findall(r"step \d: ({.*})", text)]


def in_mlflow(out: Path, text: str) -> list[dict[str, float]]:
    with closing(sqlite3.connect(out / "mlflow.db")) as database:
        statuses = database.execute("SELECT status FROM runs").fetchall()
        rows = database.execute("SELECT step, key, value FROM metrics").fetchall()
    assert statuses == [("FINISHED",)]
    return [{key: value for step, key, value in rows if step == n} for n in range(NUM_EPOCHS)]


LOGGED = {
    "print": printed,
    "mlflow": in_mlflow,
}
"""What a run has left with each tracker: the numbers of each epoch."""


def test_compiled_and_in_one_process(tmp_path: Path) -> None:
    """Two ranks count the same samples as one, and learn the same."""
    need("torchmetrics")
    script = EXAMPLES / "train_tools.py"
    found = []
    for by, words in ((TORCHMN_RUN, []), (TORCHMN_RUN, ["--compile"]), ((), [])):
        text = start(script, *words, by=by, cwd=tmp_path, TMPDIR=str(tmp_path))
        lines = [line for line in text.splitlines() if "accuracy " in line]
        assert lines, text
        found.append(accuracy(lines[-1]))
    assert max(found) - min(found) < 2 / NUM_TESTED, found


@pytest.mark.parametrize("by", [TORCHMN_RUN, ()], ids=["torchmn run", "alone"])
def test_hydra(tmp_path: Path, by: tuple[str, ...]) -> None:
    need("hydra")
    text = start(EXAMPLES / "train_hydra.py", "learning_rate=0.1", by=by, cwd=tmp_path)
    (line,) = [line for line in text.splitlines() if "accuracy" in line]
    assert accuracy(line) > 0.8
    (folder,) = re.findall(r" in (\S+)", line)
    assert (Path(folder) / "model.pt").exists()
