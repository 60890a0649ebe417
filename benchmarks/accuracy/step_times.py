"""How long a step takes at 100 Mb/s, from what `bench_exchange.py` has measured with VGG."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

NO_EXCHANGE = "no-exchange"
LINES = ("2h-100mbit-lossy", "2h-100mbit-blocks")


def step_times(path: Path) -> dict[str, float]:
    """Medians by side, over the step without exchange in the same run; empty without a record.

    Beside the same baseline two lines of the table can be compared, measured at different times.
    """
    if not path.exists():
        return {}
    lines = json.loads(path.read_text()).get("lines", {})
    times: dict[str, float] = {}
    for name in LINES:
        for run in lines.get(name, []):
            seconds: dict[str, list[float]] = {}
            for turn in run["turns"]:
                seconds.setdefault(turn["side"], []).append(turn["seconds"])
            if NO_EXCHANGE not in seconds:
                continue
            baseline = statistics.median(seconds[NO_EXCHANGE])
            times |= {side: statistics.median(own) / baseline for side, own in seconds.items()}
    return times
