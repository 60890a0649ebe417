"""Records that are incomplete are summarized as far as they go, and the summary says so."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.recorded_runs import ImitatedRun
from torchmn.errors import DataError
from torchmn.observe.read.run_reader import read_run
from torchmn.observe.report.findings import find
from torchmn.observe.report.page import page
from torchmn.observe.report.summary import summarize
from torchmn.observe.report.tables import scaling_of
from torchmn.observe.report.text import as_json


def test_throughput(tmp_path: Path) -> None:
    summary = summarize(read_run(ImitatedRun(num_ranks=4, samples=32, jitter=0.0).write(tmp_path)))
    assert summary.samples_per_s == pytest.approx(4 * 32 / summary.step_s)
    assert summary.notes == ()


def test_a_slow_first_step_is_in_no_mean(tmp_path: Path) -> None:
    usual = summarize(read_run(ImitatedRun(jitter=0.0).write(tmp_path / "usual")))
    slow = ImitatedRun(jitter=0.0, slow_start_s=30.0).write(tmp_path / "slow")
    assert summarize(read_run(slow)).step_s == pytest.approx(usual.step_s, rel=1e-4)
    assert summarize(read_run(slow)).slowest_steps()[0].step == 0


def test_lateness_is_told_without_clocks(tmp_path: Path) -> None:
    slow = ImitatedRun(slower={(1, "backward"): 1.5}, jitter=0.0)
    late = summarize(read_run(slow.write(tmp_path))).lateness_s
    np.testing.assert_allclose(late.mean(0), [0, 0.03, 0, 0], atol=1e-4)


def test_notes_on_incomplete_records(tmp_path: Path) -> None:
    imitated = ImitatedRun(num_ranks=6, has_ended=False)
    folder = imitated.write(tmp_path)
    files = [folder / "steps" / f"rank{rank}.jsonl" for rank in range(6)]
    files[1].unlink()
    files[2].write_bytes(b"nothing\n")
    lines = files[3].read_bytes().splitlines(keepends=True)
    files[3].write_bytes(b"".join(lines[:6]))
    files[5].write_bytes(files[5].read_bytes() + b"{}\n")
    for file in files:
        if file.exists():
            os.utime(file, (0, 0))
    summary = summarize(read_run(folder))
    assert [rank.start.rank for rank in summary.ranks] == [0, 4, 5]
    notes = "\n".join(summary.notes)
    assert "Ranks 0 and 3-5 ended without a last line" in notes
    assert "Of 6 ranks only ranks 0 and 2-5 left records." in notes
    assert "Rank 2 is left out: " in notes
    assert "Rank 3 recorded too few steps" in notes
    assert "1 damaged lines were left out" in notes


def test_a_run_without_a_step(tmp_path: Path) -> None:
    run = read_run(ImitatedRun(num_steps=0, has_ended=False).write(tmp_path))
    with pytest.raises(DataError, match="no step yet"):
        summarize(run)


def test_a_run_that_is_going(tmp_path: Path) -> None:
    run = read_run(ImitatedRun(has_ended=False).write(tmp_path))
    assert "still going" in summarize(run).notes[0]


def test_a_sample_is_called_one(tmp_path: Path) -> None:
    folder = ImitatedRun(num_ranks=2, num_steps=1000).write(tmp_path)
    summary = summarize(read_run(folder, max_nbytes=100_000))
    assert any("of 1,000 steps were read" in note for note in summary.notes)
    whole = summarize(read_run(folder))
    assert summary.step_s == pytest.approx(whole.step_s, rel=0.02)


# Of each kind of line: its fields with other values, and what is said of them.
ABSURD: dict[str, tuple[str, dict[str, Any], str]] = {
    "ranks": ("RunStart", {"size": 2_000_000_000}, "does not begin with a valid line"),
    "a few more ranks": ("RunStart", {"size": 10_000_000}, "Of 10000000 ranks only ranks 0-1"),
    "no time": ("Step", {"phases": {"forward": 0.0}}, "last 0 s"),
    "eternity": ("Step", {"phases": {"forward": 1e308}}, "no step yet"),
    "eternal exchanges": ("Step", {"buckets": [], "seconds": 1e308}, "no step yet"),
    "samples": ("Step", {"samples": 10**400}, "no step yet"),
    "no samples": ("Step", {"samples": 0}, ""),
    "memory": ("Memory", {"rss_nbytes": 10**30}, "damaged lines"),
    "a value": ("Value", {"value": 1e308}, ""),
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_numbers_are_reported_or_refused(tmp_path: Path, name: str) -> None:
    kind, changes, said = ABSURD[name]
    folder = ImitatedRun(num_ranks=2).write(tmp_path)
    for file in (folder / "steps").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        changed = [{**line, **changes} if line["type"] == kind else line for line in lines]
        file.write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    try:
        summary = summarize(read_run(folder))
        reports = [(summary, find(summary))]
        shown = " ".join(summary.notes) + page(reports, scaling_of([summary] * 2), None)
        json.dumps(as_json(reports, None, None), allow_nan=False)
    except DataError as error:
        shown = str(error)
    assert said in shown
