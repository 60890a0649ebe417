"""Training schedules and batches that keep the accuracy, by recipes chosen on other data.

    bench_recipes.py [--part schedules|...|all] [--choose] [--resume] [--report]

``schedules``: the recommended settings of schedules whose exchange overlaps, against every step in
float32, see `accuracy/recipes.py`. Runs are appended to `records/recipe_runs.jsonl`, those of the
choice (``--choose``) to `records/recipe_choice.jsonl`. `--resume` skips finished runs; `--report`
only prints the tables. TORCHMN_TEST_DATA is the folder of the data.
"""

from __future__ import annotations

import argparse
import os
import sys

from accuracy.execution import run_all, unfinished, wanted
from accuracy.experiments import RECIPE_CHOICE, RECIPES
from accuracy.recipes import choice_bars, recipe_bars
from record import Bar, report

PARTS = ("schedules",)


def main() -> int:
    arguments = _parse()
    folder = os.environ.get("TORCHMN_TEST_DATA")
    if folder is None and not arguments.report:
        print("bench_recipes: TORCHMN_TEST_DATA must be the folder of the data.", file=sys.stderr)
        return 2
    return report("recipes", _schedules(arguments, folder or ""))


def _schedules(arguments: argparse.Namespace, folder: str) -> list[Bar]:
    experiment = RECIPE_CHOICE if arguments.choose else RECIPES
    if not arguments.report:
        keys = wanted(experiment)
        run_all(experiment, unfinished(experiment, keys) if arguments.resume else keys, folder)
    runs = experiment.runs()
    return choice_bars(runs) if arguments.choose else recipe_bars(runs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--choose", action="store_true", help="run the choice of recipes")
    parser.add_argument("--resume", action="store_true", help="skip finished runs")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
