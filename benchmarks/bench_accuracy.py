"""Accuracy of every codec and schedule beside synchronous float32, at the same number of samples.

    bench_accuracy.py [--tasks NAME,...] [--only SIDE,...] [--seeds 0,1,...] [--resume] [--report]
    bench_accuracy.py --choose [--resume] [--report]

Two workers with one thread each, without limits on their link: it does not change the mathematics.
Every run is kept in `records/accuracy_runs.jsonl` as it comes, and the table is made of all that
are there, with what is missing named. `--resume` leaves out what was done, otherwise it is done
again; `--report` only makes the table. A name may be a pattern. Data: TORCHMN_TEST_DATA.

`--choose` looks for the learning rates of `accuracy/choice.py`, on images and seeds that the table
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
"""How often workers are started anew that ended before their plan."""


def main() -> int:
    arguments = _parse()
    experiment = CHOICE if arguments.choose else TABLE
    wanted = _wanted(experiment, arguments)
    if not arguments.report:
        folder = os.environ.get("TORCHMN_TEST_DATA")
        if folder is None:
            print("bench_accuracy: TORCHMN_TEST_DATA must name the data's folder.", file=sys.stderr)
            return 2
        if not wanted:
            print(f"bench_accuracy: no run is meant by {vars(arguments)}.", file=sys.stderr)
            return 2
        done = {key for key, run in experiment.runs().items() if run.status in ("done", "spent")}
        keys = [key for key in wanted if not (arguments.resume and key in done)]
        _carry_out(experiment, keys, folder)
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
    parser.add_argument("--choose", action="store_true", help="the runs that choose rates")
    parser.add_argument("--tasks", default="*", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--only", default="*", help="names of sides; see benchmarks/accuracy")
    parser.add_argument("--seeds", help="such as 0,1,2; default: those of the side")
    parser.add_argument("--resume", action="store_true", help="leave out what was done")
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser.parse_args()


def _wanted(experiment: Experiment, arguments: argparse.Namespace) -> list[Key]:
    """The runs that are meant, baselines first, seed by seed: a part of them is of use."""
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
    # Names may hold a comma with a space behind it.
    return any(fnmatch(name, pattern) for pattern in re.split(r",(?! )", patterns))


def _carry_out(experiment: Experiment, keys: list[Key], folder: str) -> None:
    """Let workers do all runs. A run in which they end is noted as failed, and they go on."""
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
    print(f"Given up, {len(keys)} runs are left: use --resume.", flush=True)


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
