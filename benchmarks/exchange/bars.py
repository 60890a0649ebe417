"""From the turns of a line to the bars of the report: shares of the baseline, and the limits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from record import Bar, median_bar, median_interval

from exchange.conductor import QUIET_SHARE
from exchange.table import LINES, Limit, Line

FEWEST = 5

Run = Mapping[str, Any]
"""What `measure` returns, as it stands in the JSON: ``sides`` and ``turns``."""


def bars_of(runs: Mapping[str, Sequence[Run]]) -> list[Bar]:
    """The bars of all lines that were measured, in the order of the table."""
    return [
        bar for name, line in LINES.items() if name in runs for bar in _line_bars(line, runs[name])
    ]


def _line_bars(line: Line, runs: Sequence[Run]) -> list[Bar]:
    bars = [bar for limit in line.limits for bar in _limit_bars(line, limit, runs)]
    for side in line.sides:
        run = _latest(runs, side)
        if run is None:
            continue
        if line.baseline:
            bars += _ratio(
                f"{line.name}: {side}, share of {line.baseline}", run, side, line.baseline
            )
        seconds = [turn["seconds"] for turn in _turns(run, side)]
        bars.append(median_bar(f"{line.name}: {side}", [1e3 * s for s in seconds], "ms"))
    return bars


def _limit_bars(line: Line, limit: Limit, runs: Sequence[Run]) -> list[Bar]:
    if limit.nbytes is not None:
        return [_bytes_bar(line, limit, runs)]
    name = f"{line.name}: {' | '.join(limit.ours)} / {' | '.join(limit.theirs)}"
    text = f">= {limit.at_least:.3g}"
    # Both sides of a ratio must have taken turns in one run.
    for run in reversed(runs):
        ours, theirs = _best(run, limit.ours), _best(run, limit.theirs)
        if ours and theirs:
            (bar,) = _ratio(f"{line.name}: {ours} / {theirs}", run, ours, theirs)
            bar.limit = text
            bar.holds = bar.interval is not None and bar.interval[0] >= limit.at_least
            return [bar]
    return [Bar(f"{name}: {_why_missing(limit, runs)}", float("nan"), "", text, None)]


def _bytes_bar(line: Line, limit: Limit, runs: Sequence[Run]) -> Bar:
    (side,) = limit.ours
    run = _latest(runs, side)
    text = f"{limit.nbytes / 1e6:g} +- {limit.at_least:.0%}"  # type: ignore[operator]
    name = f"{line.name}: {side}, bytes over a link, per direction"
    if run is None:
        return Bar(f"{name}: {_why_missing(limit, runs)}", float("nan"), "MB", text, None)
    bar = median_bar(name, [turn["link_bytes"] / 1e6 for turn in _turns(run, side)], "MB")
    bar.limit = text
    expected = limit.nbytes / 1e6  # type: ignore[operator]
    bar.holds = all(abs(s - expected) <= limit.at_least * expected for s in bar.samples)
    return bar


def _ratio(name: str, run: Run, ours: str, theirs: str) -> list[Bar]:
    """The speed of one side over that of another: each turn beside its neighbours."""
    ratios = paired_ratios(run["turns"], ours, theirs)
    if not ratios or ours == theirs:
        return []
    return [
        Bar(name, statistics.median(ratios), "x", samples=ratios, interval=median_interval(ratios))
    ]


def paired_ratios(turns: Sequence[Mapping[str, Any]], ours: str, theirs: str) -> list[float]:
    """Seconds of ``theirs`` over seconds of ``ours``, for each turn of ours.

    A turn is compared with the nearest turns of the other side before and after it (or the one
    there is), so that a slow spell of the machine meets both. Turns in which others used the
    processors are left out if `FEWEST` pairs remain.
    """
    quiet = _paired_ratios([t for t in turns if t["foreign_share"] <= QUIET_SHARE], ours, theirs)
    return quiet if len(quiet) >= FEWEST else _paired_ratios(turns, ours, theirs)


def _paired_ratios(turns: Sequence[Mapping[str, Any]], ours: str, theirs: str) -> list[float]:
    ratios = []
    for index, turn in enumerate(turns):
        if turn["side"] != ours:
            continue
        before = next((t for t in reversed(turns[:index]) if t["side"] == theirs), None)
        after = next((t for t in turns[index:] if t["side"] == theirs), None)
        near = [t["seconds"] for t in (before, after) if t]
        if near:
            ratios.append(statistics.mean(near) / turn["seconds"])
    return ratios


def _best(run: Run, sides: Sequence[str]) -> str | None:
    """The fastest of the sides that were measured."""
    medians = {
        side: statistics.median([turn["seconds"] for turn in _turns(run, side)])
        for side in sides
        if _turns(run, side)
    }
    return min(medians, key=medians.__getitem__) if medians else None


def _latest(runs: Sequence[Run], side: str) -> Run | None:
    return next((run for run in reversed(runs) if _turns(run, side)), None)


def _turns(run: Run, side: str) -> list[Mapping[str, Any]]:
    return [turn for turn in run["turns"] if turn["side"] == side]


def _why_missing(limit: Limit, runs: Sequence[Run]) -> str:
    said = {
        side: run["sides"][side]
        for run in runs
        for side in (*limit.ours, *limit.theirs)
        if run["sides"].get(side, "measured") != "measured"
    }
    reasons = "; ".join(f"{side} {why.split(':')[0]}" for side, why in said.items())
    return f"missing ({reasons or 'not measured'})"
