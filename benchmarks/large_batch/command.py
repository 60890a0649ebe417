"""`bench_recipes.py --part large-batch`: which runs are meant, and what is printed."""

from __future__ import annotations

import argparse
import re
from fnmatch import fnmatch

from accuracy.runs import Key
from record import report

from large_batch.choice import choice_bars, choices
from large_batch.experiments import Experiment, carry_out, table
from large_batch.experiments import choices as choice_experiment


def run(arguments: argparse.Namespace) -> int:
    """Carry out the runs and print the table. Returns the exit status."""
    experiment = choice_experiment() if arguments.choose else table()
    if not arguments.report:
        keys = _meant(experiment, arguments)
        if arguments.resume:
            done = experiment.runs()
            keys = [key for key in keys if key not in done]
        carry_out(experiment, keys, arguments.data, arguments.jobs)
    if arguments.choose:
        return report("large_batch_choice", choice_bars(experiment.runs()))
    from large_batch.bars import bars_of
    from large_batch.figure import draw
    from large_batch.page import write

    runs = experiment.runs()
    status = report("large_batch_recipes", bars_of(runs))
    if runs:
        print(f"drawn: {draw(runs)}\nwritten: {write(runs)}")
    return status


def _meant(experiment: Experiment, arguments: argparse.Namespace) -> list[Key]:
    seeds = arguments.seeds and {int(text) for text in arguments.seeds.split(",")}
    stage = {
        (each.task.name, side.name)
        for each in choices()
        if fnmatch(each.stage, arguments.stage)
        for side in each.candidates.values()
    }
    return [
        key
        for key in experiment.wanted
        if matches(key[0], arguments.tasks)
        and matches(key[1], arguments.only)
        and (not seeds or key[2] in seeds)
        and (not arguments.choose or key[:2] in stage)
    ]


def matches(name: str, patterns: str) -> bool:
    """Whether one of the patterns, separated by commas, is that of a name."""
    # Names may contain a comma followed by a space.
    return any(fnmatch(name, pattern) for pattern in re.split(r",(?! )", patterns))
