"""A plain script (`plain_script.py`) on two test hosts, each side in fresh processes of its own.

    bench_plain.py [--rates 1gbit,10gbit] [--sides SIDE,...] [--units N] [--steps N] [--keep-heap]

The sides of `bench_exchange.py` share their processes. A user's script has its own heap and is
started without `torchmn run`. Here all sides are started with torchrun's variables, one core and
one thread for each rank, warm up for some steps and then take turns; a ratio compares turns of the
same unit. The processor seconds and page faults of a step are reported too: other programs on the
machine disturb them less than the time. Every turn, with the counters of each of its steps, is
appended to `out/plain.jsonl`. Needs Linux and root.

glibc returns free memory at the end of the heap to the kernel when it exceeds 64 MB. The
activations of a step do, so each step faults their pages in again, unless something that was
allocated later holds the end of the heap. ``--keep-heap`` adds a twin of every side for which that
is turned off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from exchange.deployment import KEEP_HEAP
from plain_script import SIDES
from rank_processes import one_core_each, request, start_ranks
from record import OUT, Bar, median_bar, median_interval, report

SCRIPT = Path(__file__).parent / "plain_script.py"
KEPT = ", kept heap"
BASELINES = {"ddp": "no-exchange", "float32": "ddp", "int8": "no-exchange"}
"""What the speed of a side is compared with."""
COUNTERS = {"main_thread_s": "ms", "all_threads_s": "ms", "system_s": "ms", "page_faults": ""}
"""Counters of a step and their units in the report."""
Turns = dict[str, list[list[dict[str, Any]]]]
"""For each side its turns, each a list of what its ranks printed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", default="1gbit,10gbit", help="rates of the links, with ,")
    parser.add_argument("--sides", default=",".join(SIDES), help="sides, with ,")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before the first turn")
    parser.add_argument("--steps", type=int, default=12, help="steps of a turn")
    parser.add_argument("--units", type=int, default=5, help="turns of every side")
    parser.add_argument(
        "--keep-heap", action="store_true", help="also with malloc returning no memory"
    )
    arguments = parser.parse_args()
    from tests.netlab import missing_requirement

    if reason := missing_requirement():
        print(f"Test hosts are not available: {reason}.", file=sys.stderr)
        return 2
    sides = arguments.sides.split(",")
    if arguments.keep_heap:
        sides += [side + KEPT for side in sides]
    bars: list[Bar] = []
    for rate in arguments.rates.split(","):
        bars += _bars(rate, _measure(rate, sides, arguments))
    return report("plain", bars)


def _measure(rate: str, sides: list[str], arguments: argparse.Namespace) -> Turns:
    """Start all sides and let them take turns."""
    from tests.netlab import netlab

    cores = one_core_each(2)
    turns: Turns = defaultdict(list)
    OUT.mkdir(exist_ok=True)
    with netlab(2, rate, cores=cores) as lab, (OUT / "plain.jsonl").open("a") as file:
        jobs = {
            side: start_ranks(
                [str(SCRIPT), side.removesuffix(KEPT)],
                lab,
                port=29500 + index,
                variables=KEEP_HEAP if side.endswith(KEPT) else None,
            )
            for index, side in enumerate(sides)
        }
        for job in jobs.values():
            request(job, arguments.warm_up)
        for unit in range(arguments.units):
            for side, job in jobs.items():
                ranks = request(job, arguments.steps)
                turns[side].append(ranks)
                file.write(json.dumps({"rate": rate, "side": side, "ranks": ranks}) + "\n")
                file.flush()
                seconds = ", ".join(f"{rank['seconds']:.3f}" for rank in ranks)
                print(f"{rate}: unit {unit + 1}: {side}: {seconds} s per step", flush=True)
    return turns


def _bars(rate: str, turns: Turns) -> list[Bar]:
    bars = []
    seconds = {side: [max(rank["seconds"] for rank in ranks) for ranks in own]
               for side, own in turns.items()}  # fmt: skip
    for side in turns:
        kind, _, kept = side.partition(KEPT[0])
        baseline = BASELINES.get(kind, "") + (KEPT if kept else "")
        if baseline in turns:
            ratios = [b / a for a, b in zip(seconds[side], seconds[baseline], strict=True)]
            name = f"{rate}: {side} / {baseline}"
            bars.append(Bar(name, statistics.median(ratios), "x", samples=ratios,
                            interval=median_interval(ratios)))  # fmt: skip
    for side, own in turns.items():
        bars.append(median_bar(f"{rate}: {side}", [1e3 * s for s in seconds[side]], "ms"))
        steps = [step for ranks in own for rank in ranks for step in rank["steps"]]
        for counter, unit in COUNTERS.items():
            samples = [step[counter] * (1e3 if unit else 1) for step in steps]
            bars.append(median_bar(f"{rate}: {side}, {counter} per step", samples, unit))
    return bars


if __name__ == "__main__":
    raise SystemExit(main())
