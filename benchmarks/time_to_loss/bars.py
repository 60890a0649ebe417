"""The table: seconds and steps of each side, and how many times faster ours is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from record import Bar, median_bar, ratio_bar

from time_to_loss import choice
from time_to_loss.runs import Run, of_side
from time_to_loss.settings import CANDIDATES, COMPARED, DDP, LIMITS, OURS, RATE, TUNED

Seconds = Mapping[str, Mapping[tuple[int, str], float]]
"""By family, and by seed and day: machines have another speed on another day."""


def choice_bars(runs: Sequence[Run]) -> list[Bar]:
    """What every candidate reached on the other text, and which were chosen."""
    picked = {side.name for side in choice.chosen(runs).values()}
    bars = []
    for side in DDP:
        loss = choice.loss_of_ddp(runs, side, TUNED)
        bars.append(_one(side.name, "loss", loss, side.name in picked))
    for side in CANDIDATES:
        seconds = choice.seconds_of(runs, side)
        bars.append(_one(side.name, "s", seconds, side.name in picked))
    for text in (TUNED, COMPARED):
        bars.append(_one(f"goal of {text.name}", "loss", choice.goal_of(runs, text), False))
    return bars


def _one(name: str, unit: str, value: float | None, is_chosen: bool) -> Bar:
    if value is None:
        return Bar(f"{name}: missing", math.nan, unit)
    if math.isinf(value):
        return Bar(f"{name}: not reached", math.nan, unit)
    return Bar(f"{name}{': chosen' if is_chosen else ''}", value, unit)


def bars_of(runs: Sequence[Run], choice_runs: Sequence[Run]) -> list[Bar]:
    """All bars of the comparison."""
    sides = choice.chosen(choice_runs)
    goal = choice.goal_of(choice_runs, COMPARED)
    bars: list[Bar] = []
    seconds: dict[str, dict[tuple[int, str], float]] = {}
    for family in (*LIMITS, *OURS):
        side = sides.get(family)
        own = of_side(runs, side, COMPARED, RATE, goal) if side and goal else {}
        every = [run for same in own.values() for run in same]
        missed = sum(run["seconds"] is None for run in every)
        if not every or missed:
            what = f"{missed} of {len(every)} runs have not reached it" if every else "missing"
            bars.append(Bar(f"{family}: {what}", math.nan, "s"))
            continue
        repeated: dict[tuple[int, str], list[float]] = {}
        for run in every:
            repeated.setdefault((run["seed"], run["date"][:10]), []).append(run["seconds"])
        seconds[family] = {key: statistics.median(same) for key, same in repeated.items()}
        name = side.name if side else family
        bars.append(median_bar(name, [*seconds[family].values()], "s"))
        bars.append(median_bar(f"{name}: steps", [run["steps"] for run in every], "steps"))
    limited = choice.ours(choice_runs, sides.values())
    for ours in OURS:
        for theirs, limit in LIMITS.items():
            bars.append(ratio(ours, theirs, seconds, limit if ours == limited else None))
    if limited is None:
        bars.append(Bar("no side of ours was chosen: run --choose", math.nan, "", "chosen", False))
    return bars


def ratio(ours: str, theirs: str, seconds: Seconds, limit: str | None) -> Bar:
    """How many times the seconds of ours theirs takes; a side that is missing holds no limit."""
    name = f"{ours}: times faster than {theirs}"
    both = sorted(seconds.get(ours, {}).keys() & seconds.get(theirs, {}).keys())
    if not both:
        return Bar(f"{name}: missing", math.nan, "ratio", limit, None if limit is None else False)
    pairs = [[seconds[side][key] for key in both] for side in (theirs, ours)]
    return ratio_bar(name, pairs[0], pairs[1], limit)
