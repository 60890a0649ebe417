"""Recipes that keep accuracy: large batches (`large_batch`), and schedules of exchanges.

    bench_recipes.py [--part large-batch|all] [--only PATTERN,...] [--tasks NAME,...]
                     [--seeds 0,1,...] [--jobs N] [--resume] [--report] [--choose [--stage NAME]]

Every run is appended to a file of `records/`; the table covers all recorded runs with the current
settings and names those that are missing. `--resume` skips finished runs, which are repeated
otherwise; `--report` only prints the table and draws the figure. `--choose` carries out the runs by
which settings were chosen, on images and seeds that the table does not use. TORCHMN_TEST_DATA is
the folder of the data.
"""

from __future__ import annotations

import argparse
import sys


def _large_batch(arguments: argparse.Namespace) -> int:
    from large_batch.command import run

    return run(arguments)


PARTS = {"large-batch": _large_batch}
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
    parser.add_argument("--report", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    names = list(PARTS) if arguments.part == "all" else [arguments.part]
    return max([PARTS[name](arguments) for name in names])


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from large_batch.experiments import work

        work(*sys.argv[2:])
    else:
        raise SystemExit(main())
