"""Runs of an experiment: which are wanted, and two workers that execute them."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from record import Bar, report

from accuracy.experiments import Experiment
from accuracy.runs import Key, Run, append
from accuracy.tasks import NUM_WORKERS

WORKER = Path(__file__).parents[1] / "bench_accuracy.py"
MAX_STARTS = 5
"""Maximum number of times that the workers are started if they end before their plan does."""


def run_experiment(
    name: str,
    experiment: Experiment,
    bars_of: Callable[[Mapping[Key, Run]], list[Bar]],
    doc: str | None,
) -> int:
    """Carry out the runs that the command line asks for and print the table; the exit status."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    tasks = ", ".join(experiment.tasks)
    parser.add_argument("--tasks", default="*", help=f"of {tasks}; patterns too [all]")
    parser.add_argument("--only", default="*", help="names of sides, or patterns [all]")
    parser.add_argument("--seeds", help="such as 0,1,2 [those of the side]")
    parser.add_argument("--resume", action="store_true", help="skip finished runs")
    parser.add_argument("--report", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    if not arguments.report:
        folder = os.environ.get("TORCHMN_TEST_DATA")
        if folder is None:
            parser.error("TORCHMN_TEST_DATA must be the folder of the data.")
        seeds = [int(text) for text in arguments.seeds.split(",")] if arguments.seeds else []
        keys = wanted(experiment, tasks=arguments.tasks, only=arguments.only, seeds=seeds)
        if not keys:
            parser.error(f"no run matches --tasks {arguments.tasks} --only {arguments.only}.")
        run_all(experiment, unfinished(experiment, keys) if arguments.resume else keys, folder)
    return report(name, bars_of(experiment.runs()))


def unfinished(experiment: Experiment, keys: Sequence[Key]) -> list[Key]:
    """Those that no record has."""
    done = {key for key, run in experiment.runs().items() if run.status == "done"}
    return [key for key in keys if key not in done]


def wanted(
    experiment: Experiment, *, tasks: str = "*", only: str = "*", seeds: Sequence[int] = ()
) -> list[Key]:
    """The selected runs, baselines first, seed by seed, so that a part of them is of use.

    ``tasks`` and ``only`` are patterns of names, separated by commas; ``seeds`` replace the task's.
    """
    keys = []
    for task in experiment.tasks.values():
        meant = [
            side for side in task.sides if _is_meant(task.name, tasks) and _is_meant(side, only)
        ]
        keys += [
            (task.name, side, seed)
            for seed in (seeds or (*task.seeds, *task.fresh_seeds))
            for side in meant
            if seeds or seed in task.seeds_of(side)
        ]
    return keys


def _is_meant(name: str, patterns: str) -> bool:
    # Names may contain a comma followed by a space.
    return any(fnmatch(name, pattern) for pattern in re.split(r",(?! )", patterns))


def run_all(experiment: Experiment, keys: list[Key], folder: str) -> None:
    """Have workers execute all runs. A run that ends them is recorded as failed and skipped."""
    path = experiment.path
    for _ in range(MAX_STARTS):
        if not keys:
            return
        num_before = _num_lines(path)
        ended = _start_workers(path, keys, folder)
        keys = keys[_num_lines(path) - num_before :]
        if keys:
            task, side, seed = keys.pop(0)
            why = f"the workers ended with status {ended}; see torchmn-logs"
            run = Run.of(
                experiment.tasks[task], experiment.sides[side], seed, status="failed", why=why
            )
            append(path, run)
            print(run, flush=True)
    print(f"Stopped with {len(keys)} runs left: use --resume.", flush=True)


def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def _start_workers(path: Path, keys: list[Key], folder: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch) / "plan.json"
        plan.write_text(json.dumps(keys))
        command = [sys.executable, "-m", "torchmn", "run", "-n", str(NUM_WORKERS)]
        command += ["--backend", "gloo", str(WORKER), "worker", str(plan), str(path), folder]
        return subprocess.run(command, check=False).returncode
