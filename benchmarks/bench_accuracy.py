"""Accuracy of every codec and schedule beside synchronous float32, at the same number of samples.

    bench_accuracy.py [--tasks NAME,...] [--only SIDE,...] [--seeds 0,1,...] [--resume] [--report]

Two workers with one thread each, without limits on their link: it does not change the mathematics.
Every run is kept in `records/accuracy_runs.jsonl` as it comes, and the table is made of all that
are there, with what is missing named. `--resume` leaves out what was done, otherwise it is done
again; `--report` only makes the table. A name may be a pattern. Data: TORCHMN_TEST_DATA.
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

from accuracy.runs import Key, Run, append, load
from accuracy.sides import SIDES
from accuracy.tasks import NUM_WORKERS, TASKS
from record import RECORDS, report

RUNS = RECORDS / "accuracy_runs.jsonl"
MAX_STARTS = 5
"""How often workers are started anew that ended before their plan."""


def main() -> int:
    arguments = _parse()
    wanted = _wanted(arguments)
    if not arguments.report:
        folder = os.environ.get("TORCHMN_TEST_DATA")
        if folder is None:
            print("bench_accuracy: TORCHMN_TEST_DATA must name the data's folder.", file=sys.stderr)
            return 2
        if not wanted:
            print(f"bench_accuracy: no run is meant by {vars(arguments)}.", file=sys.stderr)
            return 2
        _carry_out([key for key in wanted if not (arguments.resume and _is_done(key))], folder)
    from accuracy.bars import bars_of
    from accuracy.figure import draw

    runs = _known()
    status = report("accuracy", bars_of(runs))
    print(f"drawn: {draw(runs)}")
    return status


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", default="*", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--only", default="*", help="names of sides; see benchmarks/accuracy")
    parser.add_argument("--seeds", help="such as 0,1,2; default: as many as the task asks for")
    parser.add_argument("--resume", action="store_true", help="leave out what was done")
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser.parse_args()


def _wanted(arguments: argparse.Namespace) -> list[Key]:
    """The runs that are meant, baselines first, seed by seed: a part of them is of use."""
    keys = []
    for task in TASKS.values():
        seeds = range(task.num_seeds)
        chosen = [int(text) for text in arguments.seeds.split(",")] if arguments.seeds else seeds
        keys += [
            (task.name, side, seed)
            for seed in chosen
            for side in task.sides
            if _is_meant(task.name, arguments.tasks) and _is_meant(side, arguments.only)
        ]
    return keys


def _is_meant(name: str, patterns: str) -> bool:
    # Names may hold a comma with a space behind it.
    return any(fnmatch(name, pattern) for pattern in re.split(r",(?! )", patterns))


def _known() -> dict[Key, Run]:
    return load(RUNS, [(t, SIDES[side]) for t in TASKS.values() for side in t.sides])


def _is_done(key: Key) -> bool:
    run = _known().get(key)
    return run is not None and run.status == "done"


def _carry_out(keys: list[Key], folder: str) -> None:
    """Let workers do all runs. A run in which they end is noted as failed, and they go on."""
    for _ in range(MAX_STARTS):
        if not keys:
            return
        num_before = _num_lines()
        ended = _start_workers(keys, folder)
        keys = keys[_num_lines() - num_before :]
        if keys:
            task, side, seed = keys.pop(0)
            why = f"the workers ended with status {ended}; see torchmn-logs"
            run = Run.of(TASKS[task], SIDES[side], seed, status="failed", why=why)
            append(RUNS, run)
            print(run, flush=True)
    print(f"Given up, {len(keys)} runs are left: use --resume.", flush=True)


def _num_lines() -> int:
    return len(RUNS.read_text().splitlines()) if RUNS.exists() else 0


def _start_workers(keys: list[Key], folder: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch) / "plan.json"
        plan.write_text(json.dumps(keys))
        command = [sys.executable, "-m", "torchmn", "run", "-n", str(NUM_WORKERS)]
        command += ["--backend", "gloo", __file__, "worker", str(plan), str(RUNS), folder]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from accuracy.worker import work

        work(*sys.argv[2:])
    else:
        raise SystemExit(main())
