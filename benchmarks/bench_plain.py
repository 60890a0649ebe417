"""A plain script (`plain_script.py`) timed from outside, on two test hosts, a fresh process a rank.

    bench_plain.py [--rates 1gbit,10gbit] [--sides SIDE,...] [--units N] [--steps N] [--keep-heap]

`bench_exchange.py` measures sides that live in the same processes and run warm. A user's script
starts cold, has its own heap, and is not started by `torchmn run`. The sides take turns, each turn
is a new job, and a ratio compares jobs of the same unit. It also reports the processor seconds and
the page faults of a step, which other programs on the machine disturb less than the time. Every
job, with the counters of each step, is appended to `out/plain.jsonl`. Needs Linux and root.

glibc returns the free memory at the end of the heap to the kernel when it exceeds 64 MB. The
activations of one step do, so every step faults their pages in again; whether that happens depends
on what else was allocated, and therefore differs between sides. ``--keep-heap`` turns it off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from plain_script import SIDES
from record import OUT, Bar, median_bar, median_interval, report

SCRIPT = Path(__file__).parent / "plain_script.py"
JOB_TIMEOUT_S = 300
KEEP_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""The second one is the default after some steps, but setting the first one disables that."""
BASELINES = {"ddp": "no-exchange", "float32": "ddp", "int8": "no-exchange"}
"""What the speed of a side is compared with."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", default="1gbit,10gbit", help="rates of the links, with ,")
    parser.add_argument("--sides", default=",".join(SIDES), help="sides, with ,")
    parser.add_argument("--units", type=int, default=5, help="jobs of every side")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a job")
    parser.add_argument(
        "--keep-heap", action="store_true", help="have malloc return no memory to the kernel"
    )
    parser.add_argument("--batch", type=int, default=32, help="images of a rank in a step")
    arguments = parser.parse_args()
    from torchmn.testing.netlab import missing_requirement

    if reason := missing_requirement():
        print(f"Test hosts cannot be made here: {reason}.", file=sys.stderr)
        return 2
    bars: list[Bar] = []
    for rate in arguments.rates.split(","):
        jobs = _measure(rate, arguments)
        bars += _bars(rate, jobs)
    return report("plain", bars)


def _measure(rate: str, arguments: argparse.Namespace) -> dict[str, list[list[dict[str, Any]]]]:
    """For each side its jobs, each a list of what its ranks printed."""
    from torchmn.testing.netlab import netlab

    own = sorted(os.sched_getaffinity(0))
    cores = [{own[index % len(own)]} for index in range(2)]
    jobs: dict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    options = ["--steps", str(arguments.steps), "--batch", str(arguments.batch)]
    OUT.mkdir(exist_ok=True)
    with netlab(2, rate, cores=cores) as lab, (OUT / "plain.jsonl").open("a") as file:
        for unit in range(arguments.units):
            for side in arguments.sides.split(","):
                ranks = _run_job(lab, [side, *options], KEEP_HEAP if arguments.keep_heap else {})
                jobs[side].append(ranks)
                file.write(
                    json.dumps(
                        {
                            "rate": rate,
                            "keep_heap": arguments.keep_heap,
                            "side": side,
                            "ranks": ranks,
                        }
                    )
                    + "\n"
                )
                file.flush()
                seconds = ", ".join(f"{rank['seconds']:.3f}" for rank in ranks)
                print(f"{rate}: unit {unit + 1}: {side}: {seconds} s per step", flush=True)
    return jobs


def _run_job(lab: Any, args: list[str], malloc: dict[str, str]) -> list[dict[str, Any]]:
    """Start the script once on every host; what its ranks printed."""
    processes = []
    for rank, host in enumerate(lab.hosts):
        env = {
            **os.environ,
            **malloc,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": lab.hosts[0].name,
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": host.interface,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(lab.hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        command = [sys.executable, SCRIPT, *args]
        processes.append(host.popen(command, env=env, stdout=subprocess.PIPE))
    try:
        texts = [process.communicate(timeout=JOB_TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(text.splitlines()[-1]) for text in texts]


def _bars(rate: str, jobs: dict[str, list[list[dict[str, Any]]]]) -> list[Bar]:
    bars = []
    seconds = {side: [max(r["seconds"] for r in ranks) for ranks in own]
               for side, own in jobs.items()}  # fmt: skip
    for side, baseline in BASELINES.items():
        if side in jobs and baseline in jobs:
            ratios = [b / a for a, b in zip(seconds[side], seconds[baseline], strict=True)]
            bars.append(
                Bar(f"{rate}: {side} / {baseline}", statistics.median(ratios), "x",
                    samples=ratios, interval=median_interval(ratios))
            )  # fmt: skip
    for side, own in jobs.items():
        bars.append(median_bar(f"{rate}: {side}", [1e3 * s for s in seconds[side]], "ms"))
        for counter, unit, factor in (
            ("main_thread_s", "ms", 1e3),
            ("all_threads_s", "ms", 1e3),
            ("system_s", "ms", 1e3),
            ("page_faults", "", 1.0),
        ):
            samples = [
                factor * step[counter]
                for ranks in own
                for rank in ranks
                for step in rank["steps"][4:]
            ]
            bars.append(median_bar(f"{rate}: {side}, {counter} per step", samples, unit))
    return bars


if __name__ == "__main__":
    raise SystemExit(main())
