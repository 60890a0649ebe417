"""From the turns of a line to the bars of the report: shares of the baseline, and the limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from record import Bar, median_bar, median_interval

from exchange.exclusions import NOT_COUNTED, Exclusion
from exchange.measurement import QUIET_SHARE
from exchange.runs import Run, has_turns, newest
from exchange.table import LINES, Limit, Line

MIN_PAIRS = 5


def bars_of(runs: Mapping[str, Sequence[Run]], exclusion: Exclusion) -> list[Bar]:
    """The bars of all measured lines, in the order of the table."""
    return [
        bar
        for name, line in LINES.items()
        if name in runs
        for bar in _line_bars(line, runs[name], exclusion)
    ]


def _line_bars(line: Line, runs: Sequence[Run], exclusion: Exclusion) -> list[Bar]:
    bars = [bar for limit in line.limits for bar in _limit_bars(line, limit, runs, exclusion)]
    for side in line.sides:
        measured = newest(runs, lambda run, side=side: has_turns(run, side))
        if not measured:
            continue
        reasons = [reason for run in measured if (reason := exclusion(side, run))]
        mark = f", {reasons[0]}" if reasons else ""
        if line.baseline and line.baseline != side:
            bars += _share_bars(line, side, runs, mark)
        seconds = [turn["seconds"] for turn in _turns(measured[-1], side)]
        name = f"{line.name}: {side}, newest run{f', {NOT_COUNTED}' if reasons else ''}"
        bars.append(median_bar(name, [1e3 * s for s in seconds], "ms"))
    return bars


def _share_bars(line: Line, side: str, runs: Sequence[Run], mark: str) -> list[Bar]:
    baseline = str(line.baseline)
    own = newest(runs, lambda run: has_turns(run, side, baseline))
    if not own:
        return []
    name = f"{line.name}: {side}, share of {baseline}, {_count(own)}{mark}"
    return [_ratio(name, [paired_ratios(run["turns"], side, baseline) for run in own])]


def _limit_bars(line: Line, limit: Limit, runs: Sequence[Run], exclusion: Exclusion) -> list[Bar]:
    if limit.nbytes is not None:
        return [_bytes_bar(line, limit, runs)]
    text = f">= {limit.minimum:.3g}"

    def sides_of(run: Run) -> tuple[str | None, str | None]:
        """The best of both sides; of ours only those that count."""
        counted = [side for side in limit.ours if not exclusion(side, run)]
        return _best(run, counted), _best(run, limit.theirs)

    # Both sides of a ratio must have taken turns in one run.
    own = newest(runs, lambda run: None not in sides_of(run))
    if not own:
        name = f"{line.name}: {' | '.join(limit.ours)} / {' | '.join(limit.theirs)}"
        return [
            Bar(
                f"{name}: {_why_missing(limit, runs, exclusion)}",
                math.nan,
                "",
                text,
                None,
            )
        ]
    best = [sides_of(run) for run in own]
    ours, theirs = (" | ".join(dict.fromkeys(map(str, names))) for names in zip(*best, strict=True))
    ratios = [
        paired_ratios(run["turns"], str(ours), str(theirs))
        for run, (ours, theirs) in zip(own, best, strict=True)
    ]
    bar = _ratio(f"{line.name}: {ours} / {theirs}, {_count(own)}", ratios)
    bar.limit = text
    bar.holds = bar.interval is not None and bar.interval[0] >= limit.minimum
    return [bar]


def _bytes_bar(line: Line, limit: Limit, runs: Sequence[Run]) -> Bar:
    (side,) = limit.ours
    own = newest(runs, lambda run: has_turns(run, side))
    text = f"{limit.nbytes / 1e6:g} +- {limit.tolerance:.0%}"  # type: ignore[operator]
    name = f"{line.name}: {side}, bytes over a link, per direction"
    if not own:
        return Bar(f"{name}: missing (not measured)", math.nan, "MB", text, None)
    samples = [turn["link_bytes"] / 1e6 for run in own for turn in _turns(run, side)]
    bar = median_bar(f"{name}, {_count(own)}", samples, "MB")
    bar.limit = text
    expected = limit.nbytes / 1e6  # type: ignore[operator]
    bar.holds = all(abs(s - expected) <= limit.tolerance * expected for s in bar.samples)
    return bar


def _count(runs: Sequence[Run]) -> str:
    return f"{len(runs)} run{'s' * (len(runs) > 1)}"


def _ratio(name: str, ratios: Sequence[Sequence[float]]) -> Bar:
    """The speed of one side over that of another in some runs, all their turns together."""
    samples = [ratio for own in ratios for ratio in own]
    return Bar(
        name, statistics.median(samples), "x", samples=samples, interval=median_interval(samples)
    )


def paired_ratios(turns: Sequence[Mapping[str, Any]], ours: str, theirs: str) -> list[float]:
    """Seconds of ``theirs`` over seconds of ``ours``, for each turn of ours.

    A turn is compared with the nearest turns of the other side before and after it (or with the
    only one), so that a slow phase of the machine affects both. Turns during which other programs
    used the processors are left out if `MIN_PAIRS` pairs remain.
    """
    quiet = _paired_ratios([t for t in turns if t["foreign_share"] <= QUIET_SHARE], ours, theirs)
    return quiet if len(quiet) >= MIN_PAIRS else _paired_ratios(turns, ours, theirs)


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


def _turns(run: Run, side: str) -> list[Mapping[str, Any]]:
    return [turn for turn in run["turns"] if turn["side"] == side]


def _why_missing(limit: Limit, runs: Sequence[Run], exclusion: Exclusion) -> str:
    """The status of the sides to compare, from the newest run that has them."""
    reported: dict[str, str] = {}
    for run in runs:
        for side in (*limit.ours, *limit.theirs):
            status = run["sides"].get(side)
            if status is not None:
                reported[side] = (
                    exclusion(side, run) if status == "measured" else status.split(":")[0]
                )
    reasons = "; ".join(f"{side} {why}" for side, why in reported.items() if why)
    return f"missing ({reasons or 'not measured'})"
