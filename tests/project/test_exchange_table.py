"""The table of `make bench-exchange`: consistency, comparison of turns, sides that count."""

import math
from collections.abc import Mapping, Sequence

import pytest


def turn(side: str, seconds: float, foreign: float = 0.0, nbytes: float = 0.0) -> dict[str, object]:
    return {
        "side": side,
        "unit": 0,
        "seconds": seconds,
        "foreign_share": foreign,
        "link_bytes": nbytes,
    }


def all_count(side: str, run: object) -> str:
    return ""


def run_of(seconds: Mapping[str, float]) -> dict[str, object]:
    """A run in which each side takes five turns of these seconds."""
    turns = [turn(side, own) for _ in range(5) for side, own in seconds.items()]
    return {"sides": dict.fromkeys(seconds, "measured"), "turns": turns}


def limits_of(bars: Sequence[object], text: str) -> list[object]:
    return [bar for bar in bars if bar.limit and text in bar.bar]  # type: ignore[attr-defined]


def test_lines_and_limits_refer_to_existing_sides(load) -> None:
    table = load("exchange.table")
    for line in table.LINES.values():
        own = {*line.sides, line.baseline}
        assert own - {None} <= table.SIDES.keys(), line.name
        assert len(set(line.sides)) == len(line.sides), line.name
        for limit in line.limits:
            wanted = {*limit.ours, *(() if limit.nbytes else limit.theirs)}
            assert wanted <= own, (line.name, limit)
        assert line.steps.keys() <= own, line.name


def test_block_schedules_have_nothing_in_flight_at_either_end_of_a_turn(load) -> None:
    table = load("exchange.table")
    blocks = [side for side in table.SIDES.values() if side.build == "torchmn blocks"]
    assert blocks
    for side in blocks:
        assert (side.steps, side.lead_steps) == (table.BLOCK_STEPS, 0)
        exchanged_at = -side.warm_up_steps % table.BLOCK_STEPS
        overlap = side.options["schedule_options"].get("overlap_steps", 0)
        assert exchanged_at > 0
        assert exchanged_at + overlap < table.BLOCK_STEPS


def test_a_turn_is_compared_with_its_neighbors(load) -> None:
    bars = load("exchange.bars")
    turns = [turn("a", 1.0), turn("b", 4.0), turn("a", 3.0), turn("b", 2.0)]
    assert bars.paired_ratios(turns, "b", "a") == [0.5, 1.5]
    assert bars.paired_ratios(turns, "a", "b") == [4.0, 1.0]
    assert bars.paired_ratios(turns, "a", "c") == []


def test_disturbed_turns_count_only_if_too_few_others_remain(load) -> None:
    bars = load("exchange.bars")
    quiet = [turn("a", 1.0), turn("b", 2.0)]
    loud = [turn("a", 1.0, foreign=0.5), turn("b", 9.0)]
    assert bars.paired_ratios(quiet * 5 + loud, "a", "b") == [2.0] * 5
    assert max(bars.paired_ratios(quiet + loud, "a", "b")) > 2.0


def test_a_limit_whose_side_was_not_built_is_missing(load) -> None:
    bars = load("exchange.bars")
    run = {
        "sides": {"ddp": "measured", "every step": "not built: UnknownNameError: no"},
        "turns": [turn("ddp", 1.0)],
    }
    found = [bar for bar in bars.bars_of({"2h-1gbit-float32": [run]}, all_count) if bar.limit]
    assert len(found) == 2
    assert all(math.isnan(bar.value) and bar.holds is not True for bar in found)
    assert "every step not built" in found[0].bar


def test_bytes_must_be_within_the_tolerance(load) -> None:
    bars = load("exchange.bars")
    turns = [
        turn("mean, hierarchical", 1.0, nbytes=60.1e6),
        turn("mean, gloo in buckets", 2.0, nbytes=95e6),
    ]
    run = {"sides": {t["side"]: "measured" for t in turns}, "turns": turns}
    made = bars.bars_of({"2x2-1gbit-mean": [run]}, all_count)
    holds = {bar.bar.split(": ")[1]: bar.holds for bar in made if bar.unit == "MB"}
    assert holds == {
        "mean, hierarchical, bytes over a link, per direction, 1 run": True,
        "mean, gloo in buckets, bytes over a link, per direction, 1 run": False,
    }


@pytest.mark.parametrize(
    ("seconds", "holds"),
    [
        ([0.5], True),
        ([2.0], False),
        ([2.0, 2.0, 0.5], False),  # a fast newest run does not make up for the others
        ([0.5, 0.5, 2.0], False),  # a slow newest run is not dropped
        ([2.0, 2.0, 0.5, 0.5, 0.5], True),  # old runs are
    ],
)
def test_a_limit_uses_all_turns_of_the_newest_runs(load, seconds, holds) -> None:
    bars = load("exchange.bars")
    assert load("exchange.runs").NUM_RUNS_PER_LIMIT == 3
    runs = [run_of({"ddp": 1.0, "every step": own}) for own in seconds]
    made = bars.bars_of({"2h-1gbit-float32": runs}, all_count)
    (bar,) = limits_of(made, "every step / ddp")
    assert bar.holds is holds
    assert len(bar.samples) == 5 * min(3, len(seconds))


def test_a_side_that_fails_the_accuracy_table_satisfies_no_limit(load) -> None:
    bars, counted = load("exchange.bars"), load("exchange.exclusions")
    run = run_of({"no-exchange": 1.0, "every step int8": 1.0, "every step 1bit": 0.9})
    failed_limits = {"every step int8": "", "every step 1bit": "mnist: -0.40 points"}

    def made(**changed: str) -> list[object]:
        exclusion = counted.exclusions_from(failed_limits | changed)
        return bars.bars_of({"2h-1gbit-lossy": [run]}, exclusion)

    (bar,) = limits_of(made(), "no-exchange")
    assert (bar.bar.split(": ")[1], bar.holds) == ("every step int8 / no-exchange, 1 run", True)
    (shown,) = (bar for bar in made() if "every step 1bit, share of no-exchange" in bar.bar)
    assert shown.value == pytest.approx(1 / 0.9)
    assert "not counted: no accuracy (mnist: -0.40 points)" in shown.bar

    (bar,) = limits_of(made(**{"every step int8": "cifar: not measured"}), "no-exchange")
    assert math.isnan(bar.value)
    assert bar.holds is None
    assert "every step int8 not counted: no accuracy (cifar: not measured)" in bar.bar


def test_auto_counts_by_its_plan(load) -> None:
    counted = load("exchange.exclusions")
    exclusion = counted.exclusions_from(
        {"every step int8": "", "double buffering int8": "cifar: -2"}
    )
    plans = {"every_step": "", "double_buffering": "not counted: no accuracy (cifar: -2)"}
    for schedule, reason in plans.items():
        run = {**run_of({}), "plans": {"auto lossy": {"schedule": schedule, "codec": "int8"}}}
        assert exclusion("auto lossy", run) == reason
    assert "not measured" in exclusion("auto lossy", run_of({}))


def test_every_side_of_torchmn_names_its_accuracy(load) -> None:
    table, accuracy = load("exchange.table"), load("accuracy.sides")
    recipes = load("accuracy.recipes").RECIPE_SIDES
    builds = ("torchmn", "torchmn blocks", "double buffering, recommended", "MLP with CNTK's names")
    ours = [side for side in table.SIDES.values() if side.build in builds]
    assert len(ours) > 20
    unknown: set[str] = set()
    for side in ours:
        assert side.accuracy is None or side.accuracy, side.name
        unknown |= {*(side.accuracy or ())} - accuracy.SIDES.keys() - recipes.keys()
    assert unknown == {
        "double buffering float16"
    }  # its accuracy was never measured, so it does not count


def test_the_recorded_runs_fit_the_table(load) -> None:
    """Sides that are not measured any more stay in the runs."""
    runs, table = load("exchange.runs"), load("exchange.table")
    kept = runs.load(runs.RECORD)
    assert kept.keys() <= table.LINES.keys()
    for name, own in kept.items():
        for run in own:
            timed = {turn["side"] for turn in run["turns"]}
            assert timed <= run["sides"].keys(), name
            assert timed & {*table.LINES[name].sides}, name
