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
import os
import sys

from accuracy.choice import choice_bars, chosen
from accuracy.execution import run_all, unfinished, wanted
from accuracy.experiments import CHOICE, TABLE
from accuracy.tasks import TASKS
from record import report


def main() -> int:
    arguments = _parse()
    experiment = CHOICE if arguments.choose else TABLE
    seeds = [int(text) for text in arguments.seeds.split(",")] if arguments.seeds else []
    keys = wanted(experiment, tasks=arguments.tasks, only=arguments.only, seeds=seeds)
    if not arguments.report:
        folder = os.environ.get("TORCHMN_TEST_DATA")
        if folder is None:
            print(
                "bench_accuracy: TORCHMN_TEST_DATA must be the folder of the data.", file=sys.stderr
            )
            return 2
        if not keys:
            print(f"bench_accuracy: no run matches {vars(arguments)}.", file=sys.stderr)
            return 2
        run_all(experiment, unfinished(experiment, keys) if arguments.resume else keys, folder)
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from accuracy.worker import work

        work(*sys.argv[2:])
    else:
        raise SystemExit(main())
