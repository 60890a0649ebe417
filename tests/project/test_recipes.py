"""The recipes of `make bench-recipes`: chosen by other data than those that evaluate them."""

from __future__ import annotations

import importlib
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


@pytest.fixture
def recipes(load):  # type: ignore[no-untyped-def]
    return load("accuracy.recipes")


def test_the_seeds_of_the_evaluation_were_used_by_nothing_else(load, recipes) -> None:  # type: ignore[no-untyped-def]
    used = {
        seed
        for task in load("accuracy.tasks").TASKS.values()
        for seed in (*task.seeds, *task.fresh_seeds)
    }
    assert not used & {*recipes.RECIPE_TASK.seeds}
    assert len(recipes.RECIPE_TASK.seeds) == 5


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
