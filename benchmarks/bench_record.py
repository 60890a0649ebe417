"""What the record of steps costs, and whether the exchange that it calls exposed is that.

    bench_record.py [--units N] [--settings SETTING,...]

Two ranks with a core each: on this host, or on two test hosts (needs root). All sides are in the
same processes and take turns.
The cost is the median step with a record over that without, in pairs. The exposed exchange of the
record is what `torchmn report` shows, together with the waiting for late ranks, which steps without
an exchange do not have; the independent count is the time of a step less that of the same step
without any exchange, over the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

from rank_processes import end_ranks, one_core_each, request, start_ranks
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
    from tests.netlab import missing_requirement

    if reason := missing_requirement():
        print(f"Test hosts are not available: {reason}.", file=sys.stderr)
        return 2
    bars: list[Bar] = []
    for name in arguments.settings.split(","):
        bars += _bars(name, arguments.units)
    return report("record", bars)


def _bars(name: str, num_units: int) -> list[Bar]:
    from tests.netlab import netlab

    model, rate, num_steps, limit = SETTINGS[name]
    cores = one_core_each(2)
    OUT.mkdir(exist_ok=True)
    medians: dict[str, list[float]] = {side: [] for side in SIDES}
    shares: list[float] = []
    with (
        netlab(2, rate, cores=cores) if rate else nullcontext() as lab,
        (OUT / "record.jsonl").open("a") as file,
    ):
        hosted = 1 if lab else 2
        job = start_ranks([str(SCRIPT), model], lab, ranks_per_host=hosted, cores=cores)
        for side in SIDES:
            request(job, side, 5)
        for unit in range(num_units):
            for side in SIDES[unit % 3 :] + SIDES[: unit % 3]:
                ranks = request(job, side, num_steps)
                medians[side].append(
                    statistics.mean(statistics.median(rank["seconds"]) for rank in ranks)
                )
                if side == "recorded":
                    shares.append(
                        statistics.mean(
                            rank["record"]["exposed"] + rank["record"]["waiting"] for rank in ranks
                        )
                    )
                row = {"setting": name, "unit": unit, "side": side, "ranks": ranks}
                file.write(json.dumps(row) + "\n")
        end_ranks(job)
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
    bars.append(
        median_bar(f"{name}: exposed and waiting, by the record", [100 * s for s in shares], "%")
    )
    bars.append(median_bar(f"{name}: exposed, counted", [100 * s for s in counted], "%"))
    bars.append(
        Bar(f"{name}: record - count", difference, "points", "+- 2", abs(difference) <= 2, points)
    )
    return bars


if __name__ == "__main__":
    raise SystemExit(main())
