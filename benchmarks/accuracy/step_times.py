"""How long a step takes at 100 Mb/s, from what `bench_exchange.py` has measured with VGG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from exchange.runs import Run, has_turns, newest

NO_EXCHANGE = "no-exchange"
LINES = ("2h-100mbit-lossy", "2h-100mbit-blocks")


def step_times(lines: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """By side, the median of its step over that without exchange in the same run.

    Of the newest runs the median. With the same baseline two lines of the table can be compared,
    measured at different times.
    """
    times: dict[str, float] = {}
    for name in LINES:
        runs = lines.get(name, [])
        for side in {turn["side"] for run in runs for turn in run["turns"]}:
            own = newest(runs, lambda run, side=side: has_turns(run, side, NO_EXCHANGE))
            if own:
                times[side] = statistics.median(
                    _median_s(run, side) / _median_s(run, NO_EXCHANGE) for run in own
                )
    return times


def _median_s(run: Run, side: str) -> float:
    return statistics.median(turn["seconds"] for turn in run["turns"] if turn["side"] == side)
