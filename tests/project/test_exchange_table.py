"""The table of `make bench-exchange` hangs together; turns become ratios and runs are merged."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load_(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load_


def turn(side: str, seconds: float, foreign: float = 0.0, nbytes: float = 0.0) -> dict[str, object]:
    return {
        "side": side,
        "unit": 0,
        "seconds": seconds,
        "foreign_share": foreign,
        "link_bytes": nbytes,
    }


def test_lines_name_sides_that_exist_and_limits_name_sides_of_their_line(load) -> None:  # type: ignore[no-untyped-def]
    table = load("exchange.table")
    for line in table.LINES.values():
        own = {*line.sides, line.baseline}
        assert own - {None} <= table.SIDES.keys(), line.name
        assert len(set(line.sides)) == len(line.sides), line.name
        for limit in line.limits:
            wanted = {*limit.ours, *(() if limit.nbytes else limit.theirs)}
            assert wanted <= own, (line.name, limit)
        assert line.steps.keys() <= own, line.name


def test_blocks_have_nothing_in_flight_at_the_ends_of_a_turn(load) -> None:  # type: ignore[no-untyped-def]
    table = load("exchange.table")
    blocks = [side for side in table.SIDES.values() if side.build == "torchmn blocks"]
    assert blocks
    for side in blocks:
        assert (side.steps, side.lead_steps) == (table.BLOCK_STEPS, 0)
        exchanged_at = -side.warm_up_steps % table.BLOCK_STEPS
        overlap = side.options["schedule_options"].get("overlap_steps", 0)
        assert exchanged_at > 0
        assert exchanged_at + overlap < table.BLOCK_STEPS


def test_a_turn_is_compared_with_its_neighbours(load) -> None:  # type: ignore[no-untyped-def]
    bars = load("exchange.bars")
    turns = [turn("a", 1.0), turn("b", 4.0), turn("a", 3.0), turn("b", 2.0)]
    assert bars.paired_ratios(turns, "b", "a") == [0.5, 1.5]
    assert bars.paired_ratios(turns, "a", "b") == [4.0, 1.0]
    assert bars.paired_ratios(turns, "a", "c") == []


def test_disturbed_turns_count_only_if_there_are_too_few_others(load) -> None:  # type: ignore[no-untyped-def]
    bars = load("exchange.bars")
    quiet = [turn("a", 1.0), turn("b", 2.0)]
    loud = [turn("a", 1.0, foreign=0.5), turn("b", 9.0)]
    assert bars.paired_ratios(quiet * 5 + loud, "a", "b") == [2.0] * 5
    assert max(bars.paired_ratios(quiet + loud, "a", "b")) > 2.0


def test_a_limit_without_its_side_is_missing_and_does_not_hold(load) -> None:  # type: ignore[no-untyped-def]
    bars = load("exchange.bars")
    run = {
        "sides": {"ddp": "measured", "every step": "not built: UnknownNameError: no"},
        "turns": [turn("ddp", 1.0)],
    }
    found = [bar for bar in bars.bars_of({"2h-1gbit-float32": [run]}) if bar.limit]
    assert len(found) == 3
    assert all(math.isnan(bar.value) and bar.holds is not True for bar in found)
    assert "every step not built" in found[0].bar


def test_bytes_must_lie_around_what_is_expected(load) -> None:  # type: ignore[no-untyped-def]
    bars = load("exchange.bars")
    turns = [
        turn("mean, hierarchical", 1.0, nbytes=60.1e6),
        turn("mean, gloo in buckets", 2.0, nbytes=95e6),
    ]
    run = {"sides": {t["side"]: "measured" for t in turns}, "turns": turns}
    made = bars.bars_of({"2x2-1gbit-mean": [run]})
    verdicts = {bar.bar.split(": ")[1]: bar.holds for bar in made if bar.unit == "MB"}
    assert verdicts == {
        "mean, hierarchical, bytes over a link, per direction": True,
        "mean, gloo in buckets, bytes over a link, per direction": False,
    }


def test_a_new_run_replaces_the_sides_it_measured(load, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    bench = load("bench_exchange")
    monkeypatch.setattr(bench, "RECORDS", tmp_path)
    first = {"sides": {"no-exchange": "measured", "ddp": "measured", "auto": "measured"}}
    second = {"sides": {"no-exchange": "measured", "ddp": "measured"}}
    third = {"sides": {"no-exchange": "measured", "auto": "measured"}}
    for run in (first, second):
        bench._store("2h-1gbit-float32", run)
    kept = json.loads((tmp_path / "exchange.json").read_text())["lines"]["2h-1gbit-float32"]
    assert kept == [first, second]
    bench._store("2h-1gbit-float32", third)
    kept = json.loads((tmp_path / "exchange.json").read_text())["lines"]["2h-1gbit-float32"]
    assert kept == [second, third]
