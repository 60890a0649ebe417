"""What the record of steps costs, and whether the exchange that it calls exposed is that.

    bench_record.py [--units N] [--settings SETTING,...]

Two ranks with a core each: on this host, or on two test hosts (needs root). All sides are in the
same processes and take turns.
The cost is the median step with a record over that without, in pairs. The exposed exchange of the
record is the share of the step in ``exchange``, ``encode`` and ``decode``; the independent count is
the time of a step less that of the same step without any exchange, over the step. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from record import OUT, Bar, median_bar, ratio_bar, report

SCRIPT = Path(__file__).parent / "record_steps.py"
SIDES = ("recorded", "plain", "alone")
SETTINGS = {
    "mnist-host": ("mnist", "", 150, "<= 1.03"),
    "vgg-host": ("vgg", "", 8, "<= 1.01"),
    "mnist-10gbit": ("mnist", "10gbit", 100, "<= 1.03"),
    "vgg-10gbit": ("vgg", "10gbit", 8, "<= 1.01"),
    "vgg-1gbit": ("vgg", "1gbit", 8, "<= 1.01"),
    "mnist-1gbit": ("mnist", "1gbit", 40, None),
    "mnist-100mbit": ("mnist", "100mbit", 8, None),
}
"""Model, rate of the links (none: one host), steps of a turn, limit of the cost."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--units", type=int, default=9, help="turns of every side")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="settings, with ,")
    arguments = parser.parse_args()
    from torchmn.testing.netlab import missing_requirement

    if reason := missing_requirement():
        print(f"Test hosts are not available: {reason}.", file=sys.stderr)
        return 2
    bars: list[Bar] = []
    for name in arguments.settings.split(","):
        bars += _bars(name, arguments.units)
    return report("record", bars)


def _bars(name: str, num_units: int) -> list[Bar]:
    from torchmn.testing.netlab import netlab

    model, rate, num_steps, limit = SETTINGS[name]
    own = sorted(os.sched_getaffinity(0))
    cores = [{own[index % len(own)]} for index in range(2)]
    OUT.mkdir(exist_ok=True)
    medians: dict[str, list[float]] = {side: [] for side in SIDES}
    shares: list[float] = []
    with (
        netlab(2, rate, cores=cores) if rate else nullcontext() as lab,
        (OUT / "record.jsonl").open("a") as file,
    ):
        job = _start(lab, model, cores)
        for side in SIDES:
            _request(job, side, 5)
        for unit in range(num_units):
            for side in SIDES[unit % 3 :] + SIDES[: unit % 3]:
                ranks = _request(job, side, num_steps)
                medians[side].append(
                    statistics.mean(statistics.median(rank["seconds"]) for rank in ranks)
                )
                if side == "recorded":
                    shares.append(statistics.mean(rank["record"]["exposed"] for rank in ranks))
                row = {"setting": name, "unit": unit, "side": side, "ranks": ranks}
                file.write(json.dumps(row) + "\n")
        for process in job:
            if process.stdin:
                process.stdin.close()
            process.wait()
    counted = [
        1 - alone / own for own, alone in zip(medians["recorded"], medians["alone"], strict=True)
    ]
    points = [100 * (share - count) for share, count in zip(shares, counted, strict=True)]
    difference = statistics.median(points)
    bars = [
        median_bar(f"{name}: {side}", [1e3 * s for s in seconds], "ms a step")
        for side, seconds in medians.items()
    ]
    if limit is not None:
        bars.append(
            ratio_bar(
                f"{name}: with / without a record", medians["recorded"], medians["plain"], limit
            )
        )
    bars.append(median_bar(f"{name}: exposed, by the record", [100 * s for s in shares], "%"))
    bars.append(median_bar(f"{name}: exposed, counted", [100 * s for s in counted], "%"))
    bars.append(
        Bar(f"{name}: record - count", difference, "points", "+- 2", abs(difference) <= 2, points)
    )
    return bars


def _start(lab: Any, model: str, cores: list[set[int]]) -> list[subprocess.Popen[str]]:
    """One process on every test host, which are killed with it; or both on this host."""
    job = []
    for rank in range(2):
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": lab.hosts[0].name if lab else "127.0.0.1",
            "MASTER_PORT": "29500",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0" if lab else str(rank),
            "LOCAL_WORLD_SIZE": "1" if lab else "2",
        }
        command = [sys.executable, str(SCRIPT), model]
        if lab:
            env["GLOO_SOCKET_IFNAME"] = lab.hosts[rank].interface
            start = lab.hosts[rank].popen
        else:
            command = ["taskset", "-c", ",".join(map(str, cores[rank])), *command]
            start = partial(subprocess.Popen, text=True)
        job.append(start(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    for process in job:
        if process.stdout is None or process.stdout.readline() != '"ready"\n':
            raise RuntimeError(f"a rank has ended with status {process.wait()}")
    return job


def _request(job: list[subprocess.Popen[str]], side: str, num_steps: int) -> list[dict[str, Any]]:
    """Have all ranks train some steps; what they printed."""
    for process in job:
        print(side, num_steps, file=process.stdin, flush=True)
    return [json.loads(process.stdout.readline()) for process in job if process.stdout]


if __name__ == "__main__":
    raise SystemExit(main())
