"""Whether a run is slower than another one, and where, with runs whose difference is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.recorded_runs import ImitatedRun
from torchmn.errors import DataError
from torchmn.observe.read.run_reader import read_run
from torchmn.observe.report.comparison import Comparison, compare
from torchmn.observe.report.summary import Summary, summarize

NUM_PAIRS = 40


def run(folder: Path, seed: int, **options: Any) -> Summary:
    imitated = ImitatedRun(**{"num_ranks": 2, "num_steps": 120, "seed": seed, **options})
    return summarize(read_run(imitated.write(folder / f"run{seed}")))


def longer(found: Comparison, statistic: str) -> list[str]:
    """The phases whose whole interval is above 0, but for those shorter than a thousandth."""
    return [
        each.what
        for each in found.differences
        if each.statistic == statistic and each.what != "step" and each.low_s > 1e-4
    ]


def test_runs_of_the_same_code_rarely_differ(tmp_path: Path) -> None:
    """At most one pair in twenty may seem to, and here the noise is far below 2 % of a step."""
    summaries = [run(tmp_path, seed) for seed in range(NUM_PAIRS + 1)]
    found = [compare(*pair) for pair in zip(summaries, summaries[1:], strict=False)]
    assert [each.verdict for each in found] == ["no difference"] * NUM_PAIRS


def test_intervals_hold_the_difference_as_often_as_they_say(tmp_path: Path) -> None:
    """Of noise alone it is 0: 95 % of the intervals hold it, here of 40 with room for chance."""
    summaries = [run(tmp_path, seed, jitter=0.2) for seed in range(NUM_PAIRS + 1)]
    pairs = zip(summaries, summaries[1:], strict=False)
    steps = [compare(*pair).step("mean") for pair in pairs]
    missed = sum(not each.low_s <= 0 <= each.high_s for each in steps)
    assert missed <= 6


def on_both(phase: str, factor: float) -> dict[str, Any]:
    return {"slower": {(rank, phase): factor for rank in range(2)}}


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        (on_both("data", 6.0), "data"),
        (on_both("forward", 1.2), "forward"),
        (on_both("backward", 1.2), "backward"),
        (on_both("optimizer", 3.0), "optimizer"),
        # A late rank is not the exchange of the others.
        ({"slower": {(1, "backward"): 1.3}}, "backward"),
        ({"bandwidth_bytes_per_s": 2e8}, "exchange"),
    ],
    ids=["data", "forward", "backward", "optimizer", "a late rank", "a slow link"],
)
def test_the_phase_that_takes_longer_is_named(tmp_path: Path, change: Any, phase: str) -> None:
    found = compare(run(tmp_path, 0), run(tmp_path, 1, **change))
    assert found.verdict == "slower"
    assert longer(found, "median") == [phase]
    assert f"Phases that are longer in B: {phase} +" in found.text


def test_rare_slow_steps_count_in_the_mean(tmp_path: Path) -> None:
    """The median does not see evaluations that have become longer."""
    found = compare(
        run(tmp_path, 0, extra={"evaluation": (10, 0.1)}),
        run(tmp_path, 1, extra={"evaluation": (10, 0.4)}),
    )
    median, mean = found.step("median"), found.step("mean")
    assert abs(median.b_s - median.a_s) < 0.01 * median.a_s
    assert mean.low_s > 0.2 * mean.a_s
    assert found.verdict == "slower"
    assert longer(found, "mean") == ["evaluation"]


def test_one_slow_step_is_noise(tmp_path: Path) -> None:
    found = compare(run(tmp_path, 0), run(tmp_path, 1, slow_steps={60: (0, "other", 1.0)}))
    assert found.verdict == "no difference"


def test_a_faster_run(tmp_path: Path) -> None:
    found = compare(run(tmp_path, 0, **on_both("backward", 1.5)), run(tmp_path, 1))
    assert found.verdict == "faster"
    assert "Phases that are shorter in B: backward -" in found.text


def test_noise_that_hides_a_difference_is_told(tmp_path: Path) -> None:
    """A difference of 3 % within noise of 40 %: how much slower B may be is in the text."""
    noisy = {"jitter": 0.4, "num_steps": 30}
    slower = on_both("backward", 1.05)
    found = compare(run(tmp_path, 0, **noisy), run(tmp_path, 1, **noisy, **slower))
    assert found.verdict == "no difference"
    assert "No difference can be seen within the noise: B is less than" in found.text


def test_changed_settings_are_told(tmp_path: Path) -> None:
    settings = {"schedule": "every_step", "codec": "int8"}
    found = compare(run(tmp_path, 0), run(tmp_path, 1, settings=settings))
    assert found.changed == {"codec": ("none", "int8")}
    assert "The settings of the runs differ in codec (none, int8)." in found.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_steps": 15}, "12 steps after its warm-up, and at least 20 are needed"),
        ({"samples": 64}, "a step of a rank has 32 samples in A, and 64 in B"),
    ],
)
def test_runs_that_cannot_be_compared(tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(DataError, match="cannot be compared") as raised:
        compare(run(tmp_path, 0), run(tmp_path, 1, **options))
    assert words in str(raised.value)
