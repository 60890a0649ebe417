"""The tables of the tutorial, written from the recorded runs between two comments of the page."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from accuracy.bars import interval_of
from accuracy.runs import Key

from large_batch.bars import differences
from large_batch.prediction import efficiencies, predicted_batch
from large_batch.runs import LargeRun
from large_batch.sides import BASE, RECIPES, Side
from large_batch.tasks import BASE_BATCH, FACTORS, TASKS, Task

PAGE = Path(__file__).parents[2] / "docs" / "tutorial" / "from-one-worker-to-many.md"
MARKED = re.compile(r"(<!-- tables: [^\n]*-->\n).*?(<!-- end of tables -->)", re.DOTALL)


def text(runs: Mapping[Key, LargeRun]) -> str:
    """Both tables of both tasks."""
    parts = [line for task in TASKS.values() for line in (*_accuracies(task, runs), "")]
    return "\n".join([*parts, *_predictions(runs), ""])


def write(runs: Mapping[Key, LargeRun]) -> Path:
    """Write the tables into the page."""
    page = PAGE.read_text()
    PAGE.write_text(MARKED.sub(lambda found: found[1] + text(runs) + found[2], page))
    return PAGE


def _accuracies(task: Task, runs: Mapping[Key, LargeRun]) -> Iterator[str]:
    base = [run.accuracy for key, run in runs.items() if key[:2] == (task.name, BASE.name)]
    accuracy = f"{statistics.mean(base):.2f} %" if base else "not run"
    columns = " | ".join(f"{factor} x = {factor * BASE_BATCH}" for factor in FACTORS)
    yield f"| {task.name}: {accuracy} with batch {BASE_BATCH}; points beside it | {columns} |"
    yield "|---" * (1 + len(FACTORS)) + "|"
    for recipe, meaning in RECIPES.items():
        sides = [Side(factor=factor, recipe=recipe) for factor in FACTORS]
        cells = " | ".join(_cell(task, side, runs) for side in sides)
        yield f"| **{recipe}**: {meaning} | {cells} |"


def _cell(task: Task, side: Side, runs: Mapping[Key, LargeRun]) -> str:
    found = differences(task, side, BASE, runs)
    if not found:
        return ""
    low, high = interval_of(found) or (found[0], found[0])
    num_steps = max(run.num_steps for key, run in runs.items() if key[:2] == (task.name, side.name))
    return f"{statistics.mean(found):+.2f} [{low:+.2f}, {high:+.2f}], {num_steps} steps"


def _predictions(runs: Mapping[Key, LargeRun]) -> Iterator[str]:
    columns = " | ".join(f"{factor * BASE_BATCH}: predicted, measured" for factor in FACTORS)
    yield f"| efficiency of a sample | noise scale | {columns} |"
    yield "|---" * (2 + len(FACTORS)) + "|"
    for task in TASKS.values():
        critical = predicted_batch(task, runs)
        if critical is not None:
            cells = " | ".join(
                f"{each.predicted:.2f}, "
                + (f"{each.measured:.2f} ({each.recipe})" if each.measured else "not reached")
                for each in efficiencies(task, runs)
            )
            yield f"| {task.name} | {critical:.0f} samples | {cells} |"
