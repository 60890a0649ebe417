"""Accuracy of codecs and schedules relative to synchronous float32, for the same samples.

    bench_accuracy.py [--tasks NAME,...] [--only SIDE,...] [--seeds 0,1,...] [--resume] [--report]
    bench_accuracy.py --choose [--resume] [--report]

Two workers with one thread each, without a limit on their link, which does not affect the result.
Every run is appended to `records/accuracy_runs.jsonl`; the table covers all of them and names those
that are missing. `--resume` skips finished runs, which are repeated otherwise; `--report` only
prints the table. A name may be a pattern. TORCHMN_TEST_DATA is the folder of the data.

`--choose` selects the learning rates of `accuracy/choice.py`, on images and seeds that the table
does not use, and keeps its runs in `records/accuracy_choice.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from accuracy.choice import choice_bars, chosen
from accuracy.experiments import CHOICE, TABLE, Experiment
from accuracy.runs import Key, Run, append
from accuracy.tasks import NUM_WORKERS, TASKS
from record import report

MAX_STARTS = 5
"""Maximum number of times that the workers are started if they end before their plan does."""


def main() -> int:
    arguments = _parse()
    experiment = CHOICE if arguments.choose else TABLE
    wanted = _wanted(experiment, arguments)
    if not arguments.report:
        folder = os.environ.get("TORCHMN_TEST_DATA")
        if folder is None:
            print(
                "bench_accuracy: TORCHMN_TEST_DATA must be the folder of the data.", file=sys.stderr
            )
            return 2
        if not wanted:
            print(f"bench_accuracy: no run matches {vars(arguments)}.", file=sys.stderr)
            return 2
        done = {key for key, run in experiment.runs().items() if run.status in ("done", "spent")}
        keys = [key for key in wanted if not (arguments.resume and key in done)]
        _run_all(experiment, keys, folder)
    if arguments.choose:
        return report("accuracy_choice", choice_bars(experiment.runs()))
    from accuracy.bars import bars_of
    from accuracy.figure import draw

    runs = experiment.runs()
    status = report("accuracy", bars_of(runs, chosen(CHOICE.runs())))
    print(f"drawn: {draw(runs)}")
    return status


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--choose", action="store_true", help="run the selection of learning rates")
    parser.add_argument("--tasks", default="*", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--only", default="*", help="names of sides, see benchmarks/accuracy [all]")
    parser.add_argument("--seeds", help="such as 0,1,2 [those of the side]")
    parser.add_argument("--resume", action="store_true", help="skip finished runs")
    parser.add_argument("--report", action="store_true", help="only print the table")
    return parser.parse_args()


def _wanted(experiment: Experiment, arguments: argparse.Namespace) -> list[Key]:
    """The selected runs, baselines first, seed by seed, so that a part of them is of use."""
    keys = []
    for task in experiment.tasks.values():
        meant = [
            side
            for side in task.sides
            if _is_meant(task.name, arguments.tasks) and _is_meant(side, arguments.only)
        ]
        seeds = (*task.seeds, *task.fresh_seeds)
        if arguments.seeds:
            seeds = tuple(int(text) for text in arguments.seeds.split(","))
        keys += [
            (task.name, side, seed)
            for seed in seeds
            for side in meant
            if arguments.seeds or seed in task.seeds_of(side)
        ]
    return keys


def _is_meant(name: str, patterns: str) -> bool:
    # Names may contain a comma followed by a space.
    return any(fnmatch(name, pattern) for pattern in re.split(r",(?! )", patterns))


def _run_all(experiment: Experiment, keys: list[Key], folder: str) -> None:
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
        command += ["--backend", "gloo", __file__, "worker", str(plan), str(path), folder]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from accuracy.worker import work

        work(*sys.argv[2:])
    else:
        raise SystemExit(main())
