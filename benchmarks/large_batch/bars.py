"""From runs to the bars of the report: differences from the base batch, paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping

from accuracy.bars import interval_of
from accuracy.runs import Key
from record import Bar

from large_batch.prediction import FACTOR, efficiencies, noise_scale, predicted_batch
from large_batch.runs import LargeRun
from large_batch.sides import BASE, SIDES, TWO_WORKERS, Side
from large_batch.tasks import BASE_BATCH, FACTORS, TASKS, Task

POINTS = 0.5
"""Of accuracy, that 16 times the base batch may lose."""
Runs = Mapping[Key, LargeRun]


def bars_of(runs: Runs) -> list[Bar]:
    """The bars of both tasks, in the order of the table."""
    bars: list[Bar] = []
    for task in TASKS.values():
        bars.append(_base_bar(task, runs))
        bars += [_side_bar(task, side, runs) for side in SIDES.values() if side is not BASE]
        bars += _shape_bars(task, runs)
        bars += _prediction_bars(task, runs)
    return bars


def differences(task: Task, side: Side, other: Side, runs: Runs) -> list[float]:
    """Accuracy of a side less that of another, for the seeds that both have."""
    return [
        own.accuracy - base.accuracy
        for seed in task.seeds
        if (own := runs.get((task.name, side.name, seed)))
        and (base := runs.get((task.name, other.name, seed)))
    ]


def _num_seeds(task: Task, side: Side) -> int:
    return 1 if side is TWO_WORKERS else len(task.seeds_of(side.factor))


def _base_bar(task: Task, runs: Runs) -> Bar:
    own = [run for key, run in runs.items() if key[:2] == (task.name, BASE.name)]
    name = f"{task.name}: batch {BASE_BATCH}"
    if not own:
        return _missing(name)
    samples = [run.accuracy for run in own]
    name = f"{name}, {own[0].num_steps} steps: accuracy"
    return Bar(name, statistics.mean(samples), "%", samples=samples, interval=interval_of(samples))


def _side_bar(task: Task, side: Side, runs: Runs) -> Bar:
    own = [run for key, run in runs.items() if key[:2] == (task.name, side.name)]
    name = f"{task.name}: {side.name}"
    if side is TWO_WORKERS:
        name += ", real workers"
    # The table's bar: warm-up and LARS together, the last of the recipes.
    is_held = (side.factor, side.recipe) == (16, "LARS")
    limit = f">= -{POINTS}" if is_held else None
    found = differences(task, side, BASE, runs)
    if not found:
        return _missing(name, limit)
    name += f", {own[0].num_steps} steps"
    diverged = sum(bool(run.why) for run in own)
    if diverged:
        name += f", {diverged} of {len(own)} diverged"
    mean, holds = statistics.mean(found), None
    if len(found) < _num_seeds(task, side):
        name += f": {len(found)} of {_num_seeds(task, side)} seeds"
    elif is_held:
        holds = mean >= -POINTS
    return Bar(name, mean, "points", limit, holds, found, interval_of(found))


def _shape_bars(task: Task, runs: Runs) -> Iterator[Bar]:
    """The shape of the published tables, and ghost batch normalization."""
    for factor in (16, 64):
        recipes = {side.recipe: side for side in SIDES.values() if side.factor == factor}
        texts = {
            ("LARS", "plain"): "LARS recovers over plain",
            ("warm-up", "linear"): "a warm-up over none",
            ("warm-up", "one batch norm"): "ghost batches of a worker over one of all samples",
            ("ghosts of 32", "one batch norm"): "ghost batches of 32 over one of all samples",
        }
        for (better, worse), text in texts.items():
            name = f"{task.name}: {factor} x, {text}"
            is_held = (better, worse) != ("warm-up", "linear")
            limit = "> 0" if is_held else None
            side = recipes[better]
            found = differences(task, side, recipes[worse], runs)
            if len(found) < _num_seeds(task, side):
                yield _missing(name, limit)
                continue
            mean = statistics.mean(found)
            holds = mean > 0 if is_held else None
            yield Bar(name, mean, "points", limit, holds, found, interval_of(found))


def _prediction_bars(task: Task, runs: Runs) -> Iterator[Bar]:
    noise, critical = noise_scale(task, runs), predicted_batch(task, runs)
    name = f"{task.name}: noise scale: a larger batch will not pay"
    if critical is None:
        yield _missing(name)
        return
    parts = [noise[len(noise) * i // 4 : len(noise) * (i + 1) // 4] for i in range(4)]
    quarters = [statistics.median(part) for part in parts]
    yield Bar(name, critical, "samples", samples=quarters, interval=(min(quarters), max(quarters)))
    for each in efficiencies(task, runs):
        name = f"{task.name}: {each.factor} x: efficiency of a sample"
        if each.predicted is not None:
            yield Bar(f"{name}, predicted", each.predicted, "of the base's")
        if each.measured is None:
            yield _missing(f"{name}, measured")
            continue
        yield Bar(f"{name}, measured ({each.recipe})", each.measured, "of the base's")
        if each.critical_batch is not None and each.factor > FACTORS[0]:
            ratio = each.critical_batch / critical
            yield Bar(
                f"{task.name}: {each.factor} x: critical batch of that / noise scale",
                ratio, "ratio", f"{1 / FACTOR:.2f} to {FACTOR:g}", 1 / FACTOR <= ratio <= FACTOR,
            )  # fmt: skip


def _missing(name: str, limit: str | None = None) -> Bar:
    return Bar(f"{name}: missing", math.nan, "", limit, None)
