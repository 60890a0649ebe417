"""The large-batch table of `make bench-recipes`: simulated workers are workers, and its limits."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchmn
from torchmn.communicators import Communicator
from torchmn.testing import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load_(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load_


# ---- simulated workers ----


@pytest.fixture
def small(load):  # type: ignore[no-untyped-def]
    """A task of 80 images, its data in float64, and a network with normalization."""
    tasks = load("large_batch.tasks")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (80,), generator=generator)
    task = replace(
        tasks.TASKS["mnist"],
        num_images=80,
        epochs=2,
        milestones=(1.0, 1.5),
        warm_up_epochs=0.5,
        trust={2: 0.02},
        learning_rate=0.1,
    )
    return task, x, y


def network() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)
    ).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = parameter.data * 0 + noise / 3
    return model


@pytest.mark.parametrize("recipe", ["linear", "warm-up", "LARS"])
def test_a_simulated_run_is_that_of_two_workers(load, small, recipe: str) -> None:  # type: ignore[no-untyped-def]
    task, x, y = small
    training, sides = load("large_batch.training"), load("large_batch.sides")
    side = sides.Side(factor=2, recipe=recipe)

    def parameters(comm: Communicator) -> list[Tensor]:
        model = network()
        made = training.Recipe(task, side, model, comm, seed=3)
        if comm.size > 1:  # real workers have ordinary batch normalization
            torchmn.large_batch.revert_ghost_batch_norm(model)
        for _ in range(task.epochs):
            for chosen in made.sampler:
                made.step(model, x[chosen], y[chosen])
        made.optimizer.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    (simulated,) = run_ranks(parameters, 1)
    for real in run_ranks(parameters, 2):
        for one, other in zip(simulated, real, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_one_batch_norm_for_all_samples_is_another_training(load, small) -> None:  # type: ignore[no-untyped-def]
    """What the comparison above would find if parts were not normalized by themselves."""
    task, x, y = small
    training, sides = load("large_batch.training"), load("large_batch.sides")

    def parameters(recipe: str) -> Tensor:
        def script(comm: Communicator) -> Tensor:
            model = network()
            side = sides.Side(factor=2, recipe=recipe)
            made = training.Recipe(task, side, model, comm, seed=3)
            for chosen in made.sampler:
                made.step(model, x[chosen], y[chosen])
            made.optimizer.close()
            return nn.utils.parameters_to_vector(model.parameters()).detach()

        return run_ranks(script, 1)[0]

    apart = (parameters("warm-up") - parameters("one batch norm")).abs().max()
    assert apart > 1e-4


def test_passes_of_one_worker_each_have_the_gradient_of_one_pass_in_parts(load, small) -> None:  # type: ignore[no-untyped-def]
    (_, x, y), size = small, load("large_batch.tasks").BASE_BATCH
    accumulated, at_once = network(), network()
    torchmn.large_batch.convert_to_ghost_batch_norm(at_once, size)
    for part in range(4):
        own = slice(size * part, size * part + size)
        (cross_entropy(accumulated(x[own]), y[own]) / 4).backward()  # type: ignore[no-untyped-call]
    cross_entropy(at_once(x[: 4 * size]), y[: 4 * size]).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(accumulated.parameters(), at_once.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_a_run_of_each_recipe_gives_a_whole_record(load, small) -> None:  # type: ignore[no-untyped-def]
    task, x, y = small
    training, sides = load("large_batch.training"), load("large_batch.sides")
    task = replace(task, network=lambda: network().float(), trust=dict.fromkeys((4, 16, 64), 0.02))
    images = SimpleNamespace(train=(x.float(), y), test=(x.float()[:50], y[:50]))
    steps = {}
    for side in sides.SIDES.values():
        if side.factor in (1, 4):
            outcome = training.train(task, side, 0, images)
            assert math.isfinite(outcome["loss"])
            assert (
                len(outcome["curve"]) == len(outcome["hits"]) == load("large_batch.runs").NUM_POINTS
            )
            steps[side.name] = outcome["num_steps"]
    assert steps["base"] == 20
    assert steps["4 x, plain"] == steps["4 x, LARS"] == 6
    assert steps["4 x, growth"] == 10 + 3  # an epoch of 8, then one of 32


def test_a_loss_that_is_not_finite_ends_the_run_with_the_accuracy_of_guessing(load, small) -> None:  # type: ignore[no-untyped-def]
    task, x, y = small
    training, sides = load("large_batch.training"), load("large_batch.sides")
    task = replace(task, network=lambda: network().float(), learning_rate=1e30)
    images = SimpleNamespace(train=(x.float(), y), test=(x.float()[:50], y[:50]))
    outcome = training.train(task, sides.SIDES["4 x, linear"], 0, images)
    assert outcome["why"]
    assert outcome["accuracy"] == 100 / 5
    assert math.isfinite(outcome["loss"])


# ---- the choice ----


def test_the_choice_sees_no_seed_and_no_test_image_of_the_table(load, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    tasks, choice = load("large_batch.tasks"), load("large_batch.choice")
    monkeypatch.setattr(load("accuracy.tasks"), "load_images", fake_images)
    for name, task in tasks.TASKS.items():
        own = choice.CHOICE_TASKS[name]
        assert not {*task.seeds} & {*own.seeds}
        trained, tested = (part[0].tolist() for part in both(tasks.load(own, "")))
        assert len(trained) == own.num_images
        assert min(trained) >= 0
        assert min(tested) >= 0
        assert not {*trained} & {*tested}
        assert max(both(tasks.load(task, ""))[1][0].tolist()) < 0


def both(images: Any) -> tuple[Any, Any]:
    return images.train, images.test


def fake_images(name: str, _: str) -> Any:
    """Training images are numbers from 0, test images numbers below 0."""
    number = {"mnist": 60_000, "cifar10": 10_000}[name]
    marks = torch.arange(number, dtype=torch.float64)
    found = SimpleNamespace(
        train=SimpleNamespace(tensors=(marks, marks)),
        test=SimpleNamespace(tensors=(-1 - marks, marks)),
    )
    found.normalised = lambda: found
    return found


def test_the_settings_of_the_table_are_those_that_the_record_has_chosen(load) -> None:  # type: ignore[no-untyped-def]
    choice, experiments = load("large_batch.choice"), load("large_batch.experiments")
    runs = experiments.choices().runs()
    for each in choice.choices():
        found = choice.chosen(each, runs)  # None: its runs are not recorded
        assert found is None or found == pytest.approx(each.used), each.name


def test_a_candidate_that_is_missing_leaves_nothing_chosen(load) -> None:  # type: ignore[no-untyped-def]
    choice = load("large_batch.choice")
    each = next(iter(choice.choices()))
    runs = {
        (each.task.name, side.name, seed): SimpleNamespace(accuracy=value)
        for value, side in each.candidates.items()
        for seed in each.task.seeds
    }
    assert choice.chosen(each, runs) == max(each.candidates)
    runs.popitem()
    assert choice.chosen(each, runs) is None


# ---- the table ----


@pytest.fixture
def table_runs(load):  # type: ignore[no-untyped-def]
    """A run of each seed of a task, with an accuracy by recipe and a curve."""
    runs, experiments = load("large_batch.runs"), load("large_batch.experiments")

    def table_runs_(accuracies: dict[str, float], **more: Any) -> dict[Any, Any]:
        found = {}
        for key, (task, side) in experiments.table().wanted.items():
            if task.name == "mnist":
                found[key] = runs.LargeRun(
                    task=task.name,
                    side=side.name,
                    seed=key[2],
                    settings=runs.settings_of(task, side),
                    status="done",
                    accuracy=accuracies.get(side.name, 90.0) + 0.1 * key[2],
                    **more,
                )
        return found

    return table_runs_


def bar_of(bars: list[Any], text: str) -> Any:
    (found,) = (bar for bar in bars if text in bar.bar)
    return found


@pytest.mark.parametrize(("accuracy", "holds"), [(89.6, True), (89.4, False)])
def test_sixteen_times_the_base_may_lose_half_a_point(load, table_runs, accuracy, holds) -> None:  # type: ignore[no-untyped-def]
    bars = load("large_batch.bars").bars_of(table_runs({"16 x, LARS": accuracy}))
    bar = bar_of(bars, "mnist: 16 x, LARS,")
    assert bar.value == pytest.approx(accuracy - 90)
    assert bar.holds is holds


def test_a_missing_seed_is_no_pass(load, table_runs) -> None:  # type: ignore[no-untyped-def]
    runs = table_runs({})
    del runs["mnist", "16 x, LARS", 0]
    bars = load("large_batch.bars").bars_of(runs)
    assert bar_of(bars, "mnist: 16 x, LARS,").holds is None
    assert bar_of(bars, "mnist: 16 x, LARS recovers over plain").holds is None


@pytest.mark.parametrize(("plain", "holds"), [(88.0, True), (91.0, False)])
def test_lars_is_to_recover_what_plain_loses(load, table_runs, plain, holds) -> None:  # type: ignore[no-untyped-def]
    bars = load("large_batch.bars").bars_of(table_runs({"64 x, plain": plain}))
    assert bar_of(bars, "mnist: 64 x, LARS recovers over plain").holds is holds


def test_runs_of_other_settings_are_not_in_the_table(load, table_runs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    runs, tasks, sides = (load(f"large_batch.{name}") for name in ("runs", "tasks", "sides"))
    run = table_runs({})["mnist", "16 x, LARS", 0]
    path = tmp_path / "runs.jsonl"
    runs.append(path, run)
    task, side = tasks.TASKS["mnist"], sides.SIDES["16 x, LARS"]
    assert list(runs.load(path, [(task, side)])) == [run.key]
    for other in (
        replace(task, learning_rate=1.0),
        replace(task, trust={16: 1.0}),
        replace(task, warm_up_epochs=1.0),
        replace(task, epochs=9),
    ):
        assert runs.load(path, [(other, side)]) == {}
    assert runs.settings_of(replace(task, trust={16: 1.0}), sides.BASE) == runs.settings_of(
        task, sides.BASE
    )


def test_the_tables_of_the_tutorial_are_those_of_the_record(load) -> None:  # type: ignore[no-untyped-def]
    page, runs = load("large_batch.page"), load("large_batch.experiments").table().runs()
    if not runs:
        pytest.skip(reason="no run of the table is recorded: bench_recipes.py --part large-batch")
    text = page.text(runs)
    assert text in page.PAGE.read_text(), "write them again: bench_recipes.py --report"


# ---- the prediction ----


def test_the_measured_critical_batch_of_runs_that_follow_the_formula(load, table_runs) -> None:  # type: ignore[no-untyped-def]
    prediction, experiments = load("large_batch.prediction"), load("large_batch.experiments")
    critical, base, num = 100.0, 8, load("large_batch.runs").NUM_POINTS
    runs = table_runs({})
    for key, (_, side) in experiments.table().wanted.items():
        if key in runs:
            slow = (1 + side.factor * base / critical) / (1 + base / critical)
            curve = [math.exp(-(i + 0.5) / slow / 20) for i in range(num)]
            runs[key] = replace(runs[key], curve=curve, noise=[critical] * num)
    task = load("large_batch.tasks").TASKS["mnist"]
    assert prediction.predicted_batch(task, runs) == critical
    for each in prediction.efficiencies(task, runs)[:2]:  # 64 x does not reach it in this time
        assert each.measured == pytest.approx(each.predicted, rel=0.06)
        assert each.critical_batch == pytest.approx(critical, rel=0.3)
