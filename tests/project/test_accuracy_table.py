"""The table of `make bench-accuracy`: its limits, and that what was chosen was not chosen by it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load_(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load_


@pytest.fixture
def run_of(load):  # type: ignore[no-untyped-def]
    """A run that is done, of the table or of the choice."""
    choice, runs = load("accuracy.choice"), load("accuracy.runs")
    tasks = {**load("accuracy.tasks").TASKS, choice.TASK.name: choice.TASK}
    sides = {**load("accuracy.sides").SIDES, **choice.CANDIDATE_SIDES}

    def run_of_(task: str, side: str, seed: int, accuracy: float, **more: object) -> object:
        outcome = {"status": "done", "accuracy": accuracy, "loss": 1.0, **more}
        return runs.Run.of(tasks[task], sides[side], seed, **outcome)

    return run_of_


def by_key(runs: Sequence[object]) -> dict[object, object]:
    return {run.key: run for run in runs}  # type: ignore[attr-defined]


# ---- the choice ----


@pytest.fixture
def choice_runs(load, run_of):  # type: ignore[no-untyped-def]
    """All runs of the choice, with the same accuracies for both schedules."""
    choice = load("accuracy.choice")

    def choice_runs_(accuracies: Sequence[float]) -> list[object]:
        return [
            run_of(choice.TASK.name, f"{schedule} at {factor} of the rate", seed, accuracy)
            for schedule in choice.SCHEDULES
            for factor, accuracy in zip(choice.CANDIDATES, accuracies, strict=True)
            for seed in choice.TASK.seeds
        ]

    return choice_runs_


def test_the_best_mean_is_chosen_and_of_equals_the_larger_rate(load, choice_runs) -> None:  # type: ignore[no-untyped-def]
    chosen = load("accuracy.choice").chosen
    half = dict.fromkeys(("block momentum", "DiLoCo"), Fraction(1, 2))
    assert chosen(by_key(choice_runs([98.0, 99.0, 99.0, 98.5, 97.0]))) == half
    quarter = chosen(by_key(choice_runs([98.0, 98.1, 98.2, 99.0, 97.0])))
    assert quarter == dict.fromkeys(half, Fraction(1, 4))


def test_nothing_is_chosen_while_a_candidate_is_missing(load, choice_runs) -> None:  # type: ignore[no-untyped-def]
    choice = load("accuracy.choice")
    runs = by_key(choice_runs([98.0, 99.0, 98.0, 98.0, 97.0]))
    del runs[choice.TASK.name, "DiLoCo at 1/7 of the rate", choice.TASK.seeds[-1]]
    assert choice.chosen(runs) == {"block momentum": Fraction(1, 2)}


def test_a_candidate_that_diverges_is_not_chosen_by_its_other_seeds(load, choice_runs) -> None:  # type: ignore[no-untyped-def]
    choice = load("accuracy.choice")
    runs = by_key(choice_runs([99.9, 99.0, 98.0, 98.0, 97.0]))
    key = (choice.TASK.name, "DiLoCo at 1 of the rate", choice.TASK.seeds[0])
    runs[key] = replace(runs[key], status="failed", accuracy=math.nan)  # type: ignore[type-var]
    assert choice.chosen(runs) == {"block momentum": Fraction(1), "DiLoCo": Fraction(1, 2)}


def test_the_choice_sees_no_seed_and_no_test_image_of_the_table(load, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    tasks, choice = load("accuracy.tasks"), load("accuracy.choice")
    for task in tasks.TASKS.values():
        seeds = (*task.seeds, *task.fresh_seeds)
        assert len({*seeds}) == len(seeds)
        assert not {*seeds} & {*choice.TASK.seeds}

    number = 25_000
    marks = torch.arange(number, dtype=torch.float32)
    found = SimpleNamespace(
        train=SimpleNamespace(tensors=(marks, marks)), test=SimpleNamespace(tensors=(-marks, marks))
    )
    found.normalised = lambda: found
    monkeypatch.setattr(tasks, "load_images", lambda *_: found)
    images = tasks.load(choice.TASK, "")
    assert images.train[0].tolist() == list(range(15_000))
    assert images.test[0].tolist() == list(range(15_000, 25_000))
    assert tasks.load(tasks.TASKS["mnist"], "").test[0].tolist() == (-marks).tolist()


def test_the_choice_has_whole_blocks_only(load) -> None:  # type: ignore[no-untyped-def]
    choice, sides = load("accuracy.choice"), load("accuracy.sides")
    assert choice.TASK.num_steps(60_000 - choice.TASK.held_out) % sides.BLOCK_STEPS == 0


def test_the_rates_of_the_table_are_those_that_the_record_has_chosen(load) -> None:  # type: ignore[no-untyped-def]
    chosen = load("accuracy.choice").chosen(load("accuracy.experiments").CHOICE.runs())
    sides = [side for side in load("accuracy.sides").SIDES.values() if side.rate_of]
    assert len(sides) == 8
    assert chosen.keys() == {side.rate_of for side in sides}
    for side in sides:
        assert side.learning_rate_factor == float(chosen[side.rate_of]), side.name


# ---- the table ----


@pytest.fixture
def table_runs(load, run_of):  # type: ignore[no-untyped-def]
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
def test_a_side_passes_only_if_it_holds_all_limits(load, table_runs, mnist, cifar, reason) -> None:  # type: ignore[no-untyped-def]
    bars = load("accuracy.bars")
    points = {"mnist": mnist} | ({} if cifar is None else {"cifar": cifar})
    found = bars.failed_limits(table_runs("every step int8", **points), {})["every step int8"]
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_missing_seed_is_no_pass(load, table_runs) -> None:  # type: ignore[no-untyped-def]
    bars = load("accuracy.bars")
    runs = table_runs("every step int8", mnist=0.0, cifar=0.0)
    assert bars.failed_limits(runs, {})["every step int8"] == ""
    del runs["mnist", "every step int8", 2]
    assert bars.failed_limits(runs, {})["every step int8"] == "mnist: not measured"


def test_a_rate_that_the_choice_did_not_give_does_not_count(load, table_runs) -> None:  # type: ignore[no-untyped-def]
    bars = load("accuracy.bars")
    side = load("accuracy.sides").SIDES["DiLoCo"]
    runs = table_runs("DiLoCo", mnist=0.0, cifar=0.0)
    right = Fraction(side.learning_rate_factor).limit_denominator(9)
    assert bars.failed_limits(runs, {"DiLoCo": right})["DiLoCo"] == ""
    for chosen in ({}, {"DiLoCo": right / 2}):
        assert bars.failed_limits(runs, chosen)["DiLoCo"] == "mnist: not measured"
        (bar,) = (b for b in bars.bars_of(runs, chosen) if b.bar.startswith("mnist: DiLoCo ("))
        assert bar.holds is None


def test_a_seed_used_with_other_settings_is_spent_for_a_chosen_rate(  # type: ignore[no-untyped-def]
    load, run_of, tmp_path: Path
) -> None:
    runs, sides = load("accuracy.runs"), load("accuracy.sides").SIDES
    task = load("accuracy.tasks").TASKS["mnist"]
    path = tmp_path / "runs.jsonl"
    for name in ("DiLoCo", "every step int8"):
        runs.append(path, replace(run_of("mnist", name, 10, 98.0), settings=1))
        for seed in (10, 11):
            runs.append(path, run_of("mnist", name, seed, 99.0))
    known = [(task, sides[name]) for name in ("DiLoCo", "every step int8")]
    found = {(side, seed): run.status for (_, side, seed), run in runs.load(path, known).items()}
    assert found == {
        ("DiLoCo", 10): "spent",
        ("DiLoCo", 11): "done",
        ("every step int8", 10): "done",
        ("every step int8", 11): "done",
    }


def test_seeds_of_a_chosen_rate_are_fresh_and_have_their_baseline(load) -> None:  # type: ignore[no-untyped-def]
    tasks, sides = load("accuracy.tasks").TASKS, load("accuracy.sides")
    for task in (tasks["mnist"], tasks["cifar"]):
        assert task.fresh_seeds
        for name in task.sides:
            own = task.seeds_of(name)
            assert {*own} <= {*task.seeds_of(sides.BASELINE)}
            if sides.SIDES[name].rate_of:
                assert own == task.fresh_seeds
