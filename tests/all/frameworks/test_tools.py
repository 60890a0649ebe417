"""Tools around a loop: torch.compile, torchmetrics, trackers, Hydra, each in an example."""

from __future__ import annotations

import ast
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.all.frameworks.running import TORCHMN_RUN, TORCHRUN, need, start
from tests.all.frameworks.test_start import accuracy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[3] / "examples" / "tools"
NUM_TESTED, NUM_EPOCHS = 360, 3
KEYS = ["accuracy", "number"]


@pytest.mark.parametrize("tracker", ["print", "tensorboard", "mlflow", "wandb"])
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
            WANDB_SILENT="true",
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


def in_tensorboard(out: Path, text: str) -> list[dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = out.iterdir()
    events = EventAccumulator(str(file)).Reload()
    values = {key: [event.value for event in events.Scalars(key)] for key in KEYS}
    return [dict(zip(KEYS, step, strict=True)) for step in zip(*values.values(), strict=True)]


def in_mlflow(out: Path, text: str) -> list[dict[str, float]]:
    with closing(sqlite3.connect(out / "mlflow.db")) as database:
        statuses = database.execute("SELECT status FROM runs").fetchall()
        rows = database.execute("SELECT step, key, value FROM metrics").fetchall()
    assert statuses == [("FINISHED",)]
    return [{key: value for step, key, value in rows if step == n} for n in range(NUM_EPOCHS)]


def in_wandb(out: Path, text: str) -> list[dict[str, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    [run] = out.glob("wandb/offline-run-*")
    [file] = run.glob("*.wandb")
    records = [Record.FromString(record) for record in leveldb_records(file.read_bytes())]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    steps = [
        {"".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return [{key: step[key] for key in KEYS} for step in steps]


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Those of a file of Weights & Biases: LevelDB's log format after a header of 7 bytes."""
    place, record = 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


LOGGED = {
    "print": printed,
    "tensorboard": in_tensorboard,
    "mlflow": in_mlflow,
    "wandb": in_wandb,
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
