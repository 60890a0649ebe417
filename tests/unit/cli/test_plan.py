"""``torchmn plan`` from a table."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.json_schemas import checked
from tests.unit.observe.plan.tables import TEXT
from torchmn.cli.app import app
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
    options = ["--hosts", "2,8", "--links", "1gbit,100mbit", "--codecs", "float32,int8"]
    found = checked("plan", answer(file, *options, "--json"))
    rows = found["predictions"]
    assert len(rows) == 8
    assert {row["hosts"] for row in rows} == {2, 8}
    for row in rows:
        parts = ("compute_s", "coding_s", "exposed_s", "straggler_s")
        assert row["step_s"] == pytest.approx(sum(row[part] for part in parts))
        assert row["speed_up"] == pytest.approx(row["hosts"] * row["efficiency"])
    assert found["not_predicted"] == []
    assert any("rarer delays" in note for note in found["notes"])


def test_tables_and_what_was_left_out(file: str) -> None:
    text = answer(file, "--codecs", "float32,1bit,power_sgd")
    assert "a small training" in text
    assert "Note: the codec 1bit was timed on this machine." in text
    assert "Not predicted: The codec power_sgd cannot be timed by itself" in text
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
    path.write_text(TEXT.replace('rate = "1gbit"', "").replace("hosts = 2", "hosts = 1"))
    text = " ".join(answer(str(path)).split())
    assert text.count("no link is known") == 1
    assert "or add rate and latency_s to the table" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--codecs", "power_sgd"), "power_sgd cannot be timed"),
        (("--hosts", "two"), "--hosts 'two' must be whole numbers"),
        (("--links", "10foo"), "'10foo' is not a positive number of bits"),
        (("--hosts", "-1"), "--hosts must be at least 1, got -1"),
        (("--schedules", "foo"), "No prediction model for schedule 'foo': there is one for every"),
    ],
)
def test_values_that_make_no_sense(file: str, words: tuple[str, ...], text: str) -> None:
    """Named by their option, and without what else could not be predicted."""
    with pytest.raises(UsageError, match=text) as caught:
        answer(file, *words)
    assert "cannot be predicted" not in str(caught.value)
