"""``torchmn plan`` from a description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.planning.descriptions import TEXT
from torchmn.cli.main import app
from torchmn.errors import UsageError


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "training.toml"
    path.write_text(TEXT)
    return str(path)


def answer(*args: str, columns: int = 200) -> str:
    done = CliRunner().invoke(app, ["plan", *args], env={"COLUMNS": str(columns)})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def test_options_are_combined(file: str) -> None:
    options = ["--hosts", "2,4", "--links", "1gbit,100mbit", "--codecs", "float32,int8"]
    found = json.loads(answer(file, *options, "--json"))
    settings = [row["setting"] for row in found["predictions"]]
    assert len(settings) == 8
    assert {setting["hosts"] for setting in settings} == {2, 4}
    for row in found["predictions"]:
        assert row["low_s"] < row["step_s"] < row["high_s"]
        parts = ("compute_s", "coding_s", "exposed_s", "straggler_s")
        assert row["step_s"] == pytest.approx(sum(row[part] for part in parts))
    assert found["what_pays"][0]["gain"] >= found["what_pays"][-1]["gain"]


def test_tables_and_what_was_left_out(file: str) -> None:
    text = answer(file, "--codecs", "float32,1bit")
    assert "a small training" in text
    assert "what would pay" in text
    assert "The codec 1bit was not timed" in text
    assert "rarer delays" in text


def test_80_columns_are_enough(file: str) -> None:
    """Nothing is cut, and what is the same everywhere is shown once."""
    text = answer(file, "--links", "10gbit,100mbit", "--hosts", "2,4", columns=80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "all with schedule every_step, codec float32" in text
    assert text.count("100mbit") == 4


def test_without_a_link_one_message_names_it(tmp_path: Path) -> None:
    path = tmp_path / "one_host.toml"
    table = TEXT.index("[link]")
    text = TEXT[:table] + TEXT[TEXT.index("\n[", table) + 1 :]
    path.write_text(text.replace("hosts = 2", "hosts = 1"))
    text = " ".join(answer(str(path)).split())
    assert text.count("no link is known") == 1
    assert "or add [link] with rate and latency_s" in text


def test_nothing_to_predict_is_an_error(file: str) -> None:
    with pytest.raises(UsageError, match="1bit was not timed"):
        answer(file, "--codecs", "1bit")
    with pytest.raises(UsageError, match="--hosts 'two' must be whole numbers"):
        answer(file, "--hosts", "two")
    with pytest.raises(UsageError, match="either one description"):
        answer(file, file)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--links", "10foo"), "'10foo' is not a rate. Write it as '10gbit'"),
        (("--links", "1gbit,fast"), "'fast' is not a rate"),
        (("--batches", "0"), "--batches must be at least 1, got 0"),
        (("--hosts", "-1"), "--hosts must be at least 1, got -1"),
        (("--cores-per-rank", "-1"), "--cores-per-rank must be above 0, got -1"),
        (("--block-steps", "0"), "--block-steps must be at least 1, got 0"),
        (("--overlap-steps", "-1"), "--overlap-steps must be at least 0, got -1"),
        (("--overlap-steps", "4", "--block-steps", "4"), "must be less than the 4 steps of a"),
        (("--schedules", "foo"), "No prediction model for schedule 'foo': there is one for every"),
    ],
)
def test_values_that_make_no_sense(file: str, words: tuple[str, ...], text: str) -> None:
    """Named by their option, and without what else could not be predicted."""
    with pytest.raises(UsageError, match=text) as caught:
        answer(file, *words)
    assert "cannot be predicted" not in str(caught.value)


def test_a_picture(file: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    answer(file, "--links", "1gbit,100mbit", "--picture", str(path))
    text = path.read_text()
    assert text.count("every_step, float32") >= 2 or "<svg" in text
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    for name, words in {
        "plan.wood": "ending is not that of a format. Write plan.png",
        "plan": "Write plan.png",
        "folder": "Write folder.png",
        "none/plan.png": r"cannot be written \(No such file or directory\): name",
    }.items():
        with pytest.raises(UsageError, match=words):
            answer(file, "--picture", str(tmp_path / name))
    assert sorted(tmp_path.iterdir()) == before
