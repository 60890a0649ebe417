"""The recipes of `make bench-recipes`: chosen by other data than those that evaluate them."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torchmn.schedules import DiLoCo, DoubleBuffering

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load_(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load_


@pytest.fixture
def recipes(load):  # type: ignore[no-untyped-def]
    return load("accuracy.recipes")


@pytest.fixture
def choice_runs(load, recipes):  # type: ignore[no-untyped-def]
    """All runs of the choice; ``losses`` of some candidates, 1 of the others."""
    runs = load("accuracy.runs")

    def choice_runs_(losses: dict[str, float]) -> dict[object, object]:
        task = recipes.CHOICE_TASK
        found = [
            runs.Run.of(task, side, seed, status="done", test_loss=losses.get(side.name, 1.0))
            for side in recipes.CHOICE_SIDES.values()
            for seed in task.seeds
        ]
        return {run.key: run for run in found}

    return choice_runs_


def test_the_choice_and_the_evaluation_share_nothing(load, recipes) -> None:  # type: ignore[no-untyped-def]
    choice, evaluated = recipes.CHOICE_TASK, recipes.RECIPE_TASK
    assert choice.network is not evaluated.network
    assert choice.held_out > 0 == evaluated.held_out
    others = load("accuracy.tasks").TASKS.values()
    used = {seed for task in (*others, choice) for seed in (*task.seeds, *task.fresh_seeds)}
    assert not used & {*evaluated.seeds}
    assert len(evaluated.seeds) == 5
    of_both = (choice.learning_rate, choice.batch, choice.momentum, choice.weight_decay)
    assert of_both == (
        evaluated.learning_rate,
        evaluated.batch,
        evaluated.momentum,
        evaluated.weight_decay,
    )


def test_the_lowest_loss_is_chosen_and_nothing_while_runs_are_missing(recipes, choice_runs) -> None:  # type: ignore[no-untyped-def]
    name = "DiLoCo, outer rate 0.7, momentum 0.7, eager"
    runs = choice_runs({name: 0.9})
    assert recipes.chosen(runs)["DiLoCo"].name == name
    runs.pop((recipes.CHOICE_TASK.name, name, recipes.CHOICE_TASK.seeds[0]))
    assert "DiLoCo" not in recipes.chosen(runs)


def test_a_candidate_that_failed_is_not_chosen(load, recipes, choice_runs) -> None:  # type: ignore[no-untyped-def]
    best = recipes.CANDIDATES["double buffering"][0].name
    runs = choice_runs({best: 0.5})
    key = (recipes.CHOICE_TASK.name, best, recipes.CHOICE_TASK.seeds[0])
    runs[key] = load("dataclasses").replace(runs[key], status="failed", test_loss=math.nan)
    assert recipes.chosen(runs)["double buffering"].name != best


def test_what_is_recommended_was_chosen(load, recipes) -> None:  # type: ignore[no-untyped-def]
    """By the recorded runs."""
    chosen = recipes.chosen(load("accuracy.experiments").RECIPE_CHOICE.runs())
    options = chosen["DiLoCo"].options
    schedule = DiLoCo.recommended()
    (group,) = schedule._make_outer([torch.zeros(1)]).param_groups
    assert (group["lr"], group["momentum"]) == (options["outer_rate"], options["outer_momentum"])
    assert (schedule.eager, schedule.overlap_steps) == (options["eager"], options["overlap_steps"])
    assert chosen["double buffering"].options["eager"] == DoubleBuffering.recommended().eager


def test_block_momentum_is_evaluated_as_it_was_chosen(load, recipes) -> None:  # type: ignore[no-untyped-def]
    """By the recorded runs: one candidate has less than 1.03 times the loss of every step."""
    losses = recipes.relative_losses(load("accuracy.experiments").RECIPE_CHOICE.runs())
    candidates = recipes.LATER_CANDIDATES["block momentum"]
    (below,) = (side for side in candidates if losses[side.name] < 1.03)
    evaluated = [recipes.RECIPE_SIDES[f"{below.name}{end}"] for end in ("", ", int8")]
    assert [side.codec for side in evaluated] == [None, "int8"]
    assert all(side.options == below.options for side in evaluated)


@pytest.mark.parametrize(
    ("points", "loss", "holds"),
    [(0.1, 1.0, True), (-0.45, 1.0, True), (-0.8, 1.0, False), (0.1, 1.1, False)],
)
def test_limits(load, recipes, points, loss, holds) -> None:  # type: ignore[no-untyped-def]
    runs_of, task = load("accuracy.runs").Run, recipes.RECIPE_TASK
    runs = {}
    for name, side in recipes.RECIPE_SIDES.items():
        is_base = name == task.sides[0]
        for index, seed in enumerate(task.seeds):
            accuracy = 65 + (0 if is_base else points + 0.4 * (index - 2))
            run = runs_of.of(
                task, side, seed, status="done", accuracy=accuracy, loss=1.0 if is_base else loss
            )
            runs[run.key] = run
    bars = recipes.recipe_bars(runs)
    assert len(bars) == 2 * (len(task.sides) - 1)
    assert all(bar.holds for bar in bars) is holds
    failed = recipes.failed_recipes(runs)
    assert failed.keys() == {*task.sides[1:]}
    assert all((reason == "") is holds for reason in failed.values())


def test_a_recipe_that_was_not_measured_has_failed(recipes) -> None:  # type: ignore[no-untyped-def]
    assert all(recipes.failed_recipes({}).values())
