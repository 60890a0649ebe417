"""`make bench-lm`: compared runs choose nothing, and missing or disturbed ones hold no limit."""

import json
from typing import Any

import pytest


@pytest.fixture
def run_of():
    """A recorded run of a side: as the file has it, so that tuples are lists."""

    def run_of_(side, text, **more):
        made = {
            "date": "2026-11-25T12:00:00+00:00",
            "seed": text.seeds[0],
            "text": text.name,
            "foreign_share": 0.0,
            "steps": 200,
        }
        made.update(side.settings(), **more)
        return json.loads(json.dumps(made))

    return run_of_


@pytest.fixture
def choice_runs(load, run_of):
    """DDP's best rate is the second one; of other families the last candidate is the fastest."""
    settings = load("time_to_loss.settings")
    goal = {"rate": settings.FAST_RATE, "seed": settings.TUNED.goal_seed, "goal": 0.0}
    losses = zip(settings.DDP, (2.3, 2.1, 2.2), strict=True)
    runs = [
        run_of(side, settings.TUNED, curve=[[settings.NUM_STEPS, 9.0, loss]], **goal)
        for side, loss in losses
    ]
    curve = [[settings.NUM_STEPS, 9.0, 1.8996]]
    runs.append(run_of(settings.DDP[1], settings.COMPARED, curve=curve, **goal))
    runs += [
        run_of(side, settings.TUNED, rate=settings.RATE, goal=2.101, seconds=100.0 - index)
        for index, side in enumerate(settings.CANDIDATES)
    ]
    return runs


def test_compared_texts_and_seeds_choose_nothing(load) -> None:
    settings = load("time_to_loss.settings")
    compared, tuned = settings.COMPARED, settings.TUNED
    assert compared.name != tuned.name
    assert compared.goal_seed not in compared.seeds
    assert not {*compared.seeds} & {*tuned.seeds}


def test_goals_and_sides_are_those_of_the_rule(load, choice_runs) -> None:
    settings, choice = load("time_to_loss.settings"), load("time_to_loss.choice")
    assert choice.goal_of(choice_runs, settings.TUNED) == 2.101
    assert choice.goal_of(choice_runs, settings.COMPARED) == 1.9
    chosen = choice.chosen(choice_runs)
    assert chosen["ddp"] == settings.DDP[1]
    assert chosen["ddp fp16"].learning_rate == settings.DDP[1].learning_rate
    last = {side.family: side for side in settings.CANDIDATES}
    assert {family: chosen[family] for family in last} == last
    assert choice.ours(choice_runs, chosen.values()) == "torchmn DiLoCo"


@pytest.mark.parametrize("more", [{"seconds": None}, {"foreign_share": 0.5}, {"failed": "why"}])
def test_a_candidate_that_missed_the_goal_is_not_chosen(load, choice_runs, more) -> None:
    choice, settings = load("time_to_loss.choice"), load("time_to_loss.settings")
    choice_runs[-1].update(more)
    chosen = choice.chosen(choice_runs)
    if "seconds" in more:
        assert chosen["torchmn DiLoCo"] == settings.CANDIDATES[-2]
    else:
        assert "torchmn DiLoCo" not in chosen


def _compared_runs(load, run_of, choice_runs) -> list[dict[str, Any]]:
    settings, choice = load("time_to_loss.settings"), load("time_to_loss.choice")
    seconds = {"ddp": 120.0, "ddp fp16": 70.0, "torchft DiLoCo": 26.0, "torchmn gradients": 25.0}
    return [
        run_of(
            side,
            settings.COMPARED,
            seed=seed,
            goal=1.9,
            rate=settings.RATE,
            seconds=seconds.get(side.family, 20.0) + 0.1 * seed,
        )
        for side in choice.chosen(choice_runs).values()
        for seed in settings.COMPARED.seeds
    ]


def test_limits_are_for_the_family_that_was_faster_before(load, run_of, choice_runs) -> None:
    bars = load("time_to_loss.bars").bars_of(_compared_runs(load, run_of, choice_runs), choice_runs)
    held = {bar.bar: bar.holds for bar in bars if bar.limit}
    assert held == {
        "torchmn DiLoCo: times faster than ddp": True,
        "torchmn DiLoCo: times faster than torchft DiLoCo": True,
    }


@pytest.mark.parametrize("more", [{"seconds": None}, {"foreign_share": 0.5}, {"failed": "why"}])
@pytest.mark.parametrize("family", ["torchmn DiLoCo", "torchft DiLoCo"])
def test_a_side_that_missed_the_goal_holds_no_limit(load, run_of, choice_runs, more, family):
    runs = _compared_runs(load, run_of, choice_runs)
    for run in runs:
        if run["family"] == family:
            run.update(more)
    bars = load("time_to_loss.bars").bars_of(runs, choice_runs)
    limits = [bar for bar in bars if bar.limit and family in bar.bar]
    assert limits
    assert not any(bar.holds for bar in limits)


def test_runs_of_different_days_make_no_pair(load, run_of, choice_runs) -> None:
    runs = _compared_runs(load, run_of, choice_runs)
    for run in runs:
        if run["family"] == "torchft DiLoCo":
            run["date"] = "2026-11-24T12:00:00+00:00"
    bars = load("time_to_loss.bars").bars_of(runs, choice_runs)
    held = {bar.bar: bar.holds for bar in bars if bar.limit}
    assert held == {
        "torchmn DiLoCo: times faster than ddp": True,
        "torchmn DiLoCo: times faster than torchft DiLoCo: missing": False,
    }
