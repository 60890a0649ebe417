"""Recipes that keep the accuracy: large batches, schedules whose exchange overlaps, translation.

    bench_recipes.py [--part large-batch|schedules|translation|all] [--only PATTERN,...]
                     [--tasks NAME,...] [--seeds 0,1,...] [--jobs N] [--resume] [--report]
                     [--choose [--stage NAME]]

``large-batch`` is described in `large_batch/tasks.py`, ``schedules`` in `accuracy/recipes.py`,
``translation`` in `translation.py`.
Every run is appended to a file of `records/`; the tables cover all recorded runs with the current
settings and name those that are missing. `--resume` skips finished runs, which are repeated
otherwise; `--report` only prints the tables and draws the figure. `--choose` carries out the runs
by which settings were chosen, on images and seeds that the tables do not use. TORCHMN_TEST_DATA is
the folder of the data.
"""

from __future__ import annotations

import argparse
import os
import sys


def _large_batch(arguments: argparse.Namespace) -> int:
    from large_batch.command import run

    return run(arguments)


def _schedules(arguments: argparse.Namespace) -> int:
    from accuracy.execution import run_all, unfinished, wanted
    from accuracy.experiments import RECIPE_CHOICE, RECIPES
    from accuracy.recipes import choice_bars, recipe_bars
    from record import report

    experiment = RECIPE_CHOICE if arguments.choose else RECIPES
    if not arguments.report:
        seeds = [int(text) for text in arguments.seeds.split(",")] if arguments.seeds else []
        keys = wanted(experiment, tasks=arguments.tasks, only=arguments.only, seeds=seeds)
        keys = unfinished(experiment, keys) if arguments.resume else keys
        run_all(experiment, keys, arguments.data)
    runs = experiment.runs()
    name = "recipes_choice" if arguments.choose else "recipes"
    return report(name, choice_bars(runs) if arguments.choose else recipe_bars(runs))


def _translation(arguments: argparse.Namespace) -> int:
    from translation import run

    return run(arguments)


PARTS = {"large-batch": _large_batch, "schedules": _schedules, "translation": _translation}
"""By name, what runs the part and prints its table; it returns the exit status."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", default="all", choices=(*PARTS, "all"))
    parser.add_argument("--choose", action="store_true", help="run the selection of settings")
    parser.add_argument("--stage", default="*", help="with --choose: rate, warm-up or trust")
    parser.add_argument("--tasks", default="*", help="names of tasks [all]")
    parser.add_argument("--only", default="*", help="names of sides, or patterns [all]")
    parser.add_argument("--seeds", help="such as 0,1,2 [those of the side]")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, on a core each [2]")
    parser.add_argument("--resume", action="store_true", help="skip finished runs")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    arguments = parser.parse_args()
    arguments.data = os.environ.get("TORCHMN_TEST_DATA")
    if arguments.data is None and not arguments.report:
        parser.error("TORCHMN_TEST_DATA must be the folder of the data.")
    if arguments.choose and arguments.part == "translation":
        parser.error("--part translation has nothing to choose: its settings were not selected.")
    names = list(PARTS) if arguments.part == "all" else [arguments.part]
    if arguments.choose:
        names = [name for name in names if name != "translation"]
    return max([PARTS[name](arguments) for name in names])


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from large_batch.experiments import work

        work(*sys.argv[2:])
    else:
        raise SystemExit(main())
