"""The experiments and the files of their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from record import RECORDS

from accuracy import recipes
from accuracy.runs import Key, Run, load
from accuracy.sides import SIDES, Side
from accuracy.tasks import TASKS, Task


@dataclass(frozen=True)
class Experiment:
    """Tasks, their sides, and the file of their runs."""

    path: Path
    tasks: Mapping[str, Task]
    sides: Mapping[str, Side]

    def runs(self) -> dict[Key, Run]:
        """The recorded runs with the current settings."""
        both = [(task, self.sides[side]) for task in self.tasks.values() for side in task.sides]
        return load(self.path, both)


TABLE = Experiment(RECORDS / "accuracy_runs.jsonl", TASKS, SIDES)
RECIPES = Experiment(
    RECORDS / "recipe_runs.jsonl",
    {recipes.RECIPE_TASK.name: recipes.RECIPE_TASK},
    recipes.RECIPE_SIDES,
)
EXPERIMENTS = (TABLE, RECIPES)
