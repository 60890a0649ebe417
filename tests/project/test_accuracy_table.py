"""The tables of `make bench-accuracy` and `make bench-recipes`: their limits and their seeds."""

from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_of(load):
    """A run of the table that is done."""
    runs = load("accuracy.runs")
    tasks, sides = load("accuracy.tasks").TASKS, load("accuracy.sides").SIDES

    def run_of_(task: str, side: str, seed: int, accuracy: float, **more: object) -> object:
        outcome = {"status": "done", "accuracy": accuracy, "loss": 1.0, **more}
        return runs.Run.of(tasks[task], sides[side], seed, **outcome)

    return run_of_


def by_key(runs: Sequence[object]) -> dict[object, object]:
    return {run.key: run for run in runs}  # type: ignore[attr-defined]


@pytest.fixture
def table_runs(load, run_of):
    """Runs of all seeds for the baseline and one side, which differ by some points on each task."""
    tasks = load("accuracy.tasks").TASKS

    def table_runs_(side: str, **points: float) -> dict[object, object]:
        runs = []
        for name, apart in points.items():
            for seed in tasks[name].seeds_of(side):
                runs.append(run_of(name, "every step", seed, 90.0))
                runs.append(run_of(name, side, seed, 90.0 + apart + 0.1 * (-1) ** seed))
        return by_key(runs)

    return table_runs_


@pytest.mark.parametrize(
    ("mnist", "cifar", "reason"),
    [
        (0.0, 0.0, ""),
        (-0.5, 0.0, "mnist: -0.4"),
        (0.0, -3.0, "cifar: -2.9"),
        (0.0, None, "cifar: not measured"),
    ],
)
def test_a_side_passes_only_if_it_holds_all_limits(load, table_runs, mnist, cifar, reason) -> None:
    bars = load("accuracy.bars")
    points = {"mnist": mnist} | ({} if cifar is None else {"cifar": cifar})
    found = bars.failed_limits(table_runs("every step int8", **points))["every step int8"]
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_missing_seed_is_no_pass(load, table_runs) -> None:
    bars = load("accuracy.bars")
    runs = table_runs("every step int8", mnist=0.0, cifar=0.0)
    assert bars.failed_limits(runs)["every step int8"] == ""
    del runs["mnist", "every step int8", 2]
    assert bars.failed_limits(runs)["every step int8"] == "mnist: not measured"


def test_seeds_of_a_chosen_rate_are_fresh_and_have_their_baseline(load) -> None:
    tasks, sides = load("accuracy.tasks").TASKS, load("accuracy.sides")
    for task in (tasks["mnist"], tasks["cifar"]):
        assert task.fresh_seeds
        for name in task.sides:
            own = task.seeds_of(name)
            assert {*own} <= {*task.seeds_of(sides.BASELINE)}
            assert (own == task.fresh_seeds) is name.startswith(("block momentum", "DiLoCo"))


@pytest.fixture
def recipes(load):
    return load("accuracy.recipes")


def test_the_seeds_of_the_evaluation_were_used_by_nothing_else(load, recipes) -> None:
    used = {
        seed
        for task in load("accuracy.tasks").TASKS.values()
        for seed in (*task.seeds, *task.fresh_seeds)
    }
    assert not used & {*recipes.SEEDS, *recipes.EARLIER_SEEDS}
    assert not {*recipes.SEEDS} & {*recipes.EARLIER_SEEDS}
    assert (len(recipes.SEEDS), len(recipes.EARLIER_SEEDS)) == (16, 5)


@pytest.mark.parametrize(
    ("points", "loss", "holds"),
    [(0.1, 1.0, True), (-0.3, 1.0, True), (-0.45, 1.0, False), (0.1, 1.1, False)],
)
def test_limits(load, recipes, points, loss, holds) -> None:
    runs_of, task = load("accuracy.runs").Run, recipes.RECIPE_TASK
    runs = {}
    for name, side in recipes.RECIPE_SIDES.items():
        is_base = name == task.sides[0]
        for index, seed in enumerate((*recipes.SEEDS, *recipes.EARLIER_SEEDS)):
            accuracy = 65 + (0 if is_base else points + 0.1 * (-1) ** index)
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


def test_the_page_has_what_the_records_say(load, recipes) -> None:
    page = (ROOT / "docs" / "explain" / "recipes.md").read_text()
    bars = recipes.recipe_bars(load("accuracy.experiments").RECIPES.runs())
    points = [bar for bar in bars if bar.unit == "points"]
    assert len(points) == len(recipes.RECIPE_TASK.sides) - 1
    for bar in points:
        low, high = bar.interval
        assert f"{bar.value:+.2f} [{low:.2f}, {high:.2f}]" in page, bar.bar
        assert len(bar.samples) == int(bar.bar.split("(")[1].split()[0])


def test_a_recipe_that_was_not_measured_has_failed(recipes) -> None:
    assert all(recipes.failed_recipes({}).values())
