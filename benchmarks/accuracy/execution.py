"""Runs of an experiment: which are wanted, and two workers that execute them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from accuracy.experiments import Experiment
from accuracy.runs import Key, Run, append
from accuracy.tasks import NUM_WORKERS

WORKER = Path(__file__).parents[1] / "bench_accuracy.py"
MAX_STARTS = 5
"""Maximum number of times that the workers are started if they end before their plan does."""


def unfinished(experiment: Experiment, keys: Sequence[Key]) -> list[Key]:
    """Those that no record has."""
    done = {key for key, run in experiment.runs().items() if run.status in ("done", "spent")}
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
