"""Workers of one core each beside the user's own script on all cores of this machine.

    bench_own_script.py [--models NAME,...] [--units N] [--seconds S]

The same global batch in the same time: one process on one core, one process with a thread for every
core, and one worker for each core (up to four). The sides are processes that live for the whole
run and take turns; those that wait sleep. A ratio compares turns of the same unit.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from own_script import BATCHES
from rank_processes import end_ranks, request, start_ranks
from record import Bar, median_bar, ratio_bar, report

SCRIPT = str(Path(__file__).parent / "own_script.py")
MAX_WORKERS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(BATCHES), help="models, with ,")
    parser.add_argument("--units", type=int, default=9, help="turns of every side")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn, roughly")
    arguments = parser.parse_args()
    bars: list[Bar] = []
    for number, model in enumerate(arguments.models.split(",")):
        bars += _measure(model, 29600 + 10 * number, arguments)
    return report("own_script", bars)


def _measure(model: str, port: int, arguments: argparse.Namespace) -> list[Bar]:
    cores = sorted(os.sched_getaffinity(0))
    num_workers = min(len(cores), MAX_WORKERS)
    everything = f"own script, {len(cores)} threads"
    one, several = "own script, one core", f"{num_workers} workers, one core each"
    jobs = {
        one: start_ranks([SCRIPT, model, "1"], None, cores=[{cores[0]}], port=port),
        everything: start_ranks(
            [SCRIPT, model, str(len(cores))], None, cores=[set(cores)], port=port + 1
        ),
        several: start_ranks(
            [SCRIPT, model, "1"],
            None,
            ranks_per_host=num_workers,
            cores=[{core} for core in cores],
            port=port + 2,
        ),
    }
    for job in jobs.values():
        request(job, 2)
    slowest = max(rank["seconds"] for rank in request(jobs[one], 2)) / 2
    num_steps = max(2, round(arguments.seconds / slowest))
    seconds: dict[str, list[float]] = {side: [] for side in jobs}
    for _ in range(arguments.units):
        for side, job in jobs.items():
            ranks = request(job, num_steps)
            seconds[side].append(max(rank["seconds"] for rank in ranks) / num_steps)
    for job in jobs.values():
        end_ranks(job)
    bars = [
        median_bar(f"{model}: {side}", [BATCHES[model] / each for each in taken], "samples/s")
        for side, taken in seconds.items()
    ]
    for side in (one, everything):
        name = f"{model}: speed, {several} / {side}"
        bars.append(ratio_bar(name, seconds[side], seconds[several]))
    return bars


if __name__ == "__main__":
    raise SystemExit(main())
