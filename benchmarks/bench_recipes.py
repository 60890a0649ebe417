"""Schedules whose exchange overlaps, with the recommended settings (`accuracy/recipes.py`).

    bench_recipes.py [--only PATTERN,...] [--seeds 0,1,...] [--resume] [--report]

Every run is appended to `records/recipe_runs.jsonl`; the table covers all recorded runs with the
current settings and names those that are missing. TORCHMN_TEST_DATA is the folder of the data.
"""

from __future__ import annotations

from accuracy.execution import run_experiment
from accuracy.experiments import RECIPES
from accuracy.recipes import recipe_bars

if __name__ == "__main__":
    raise SystemExit(run_experiment("recipes", RECIPES, recipe_bars, __doc__))
