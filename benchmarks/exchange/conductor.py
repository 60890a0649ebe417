"""Tells the workers of a line, all at once, what to do next, and takes down how long it took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exchange.crews import Stage, WorkersLostError, stage_of
from exchange.table import SIDES, Line

QUIET_SHARE = 0.04
"""Of all processors. A turn in which others used more is repeated and counts if there is no other.
"""
MOST_TURNS = 3


def measure(
    line: Line,
    wanted: list[str],
    tell: Callable[[str], None],
    *,
    num_units: int,
    patience_s: float,
) -> dict[str, Any]:
    """The turns of a line, for each side whether it ran, and what `auto` has chosen.

    Before each turn it waits up to ``patience_s`` for others to leave the processors alone, and
    repeats turns that they disturbed; with 0 it takes all turns as they are.
    A side that ends the workers is left out and all others begin anew. Raises WorkersLostError:
    they ended before any side was built, or a side ended them again.
    """
    status: dict[str, str] = {}
    plans: dict[str, dict[str, str]] = {}
    while True:
        ready = [side for side in wanted if status.get(side, "measured") == "measured"]
        turns: list[dict[str, Any]] = []
        current = ""
        try:
            with stage_of(line, {SIDES[side].crew for side in ready}) as stage:
                for current in ready:
                    replies = stage.crew_of(current).tell("build", side=current)
                    refused = [reply["not_built"] for reply in replies if "not_built" in reply]
                    status[current] = f"not built: {refused[0]}" if refused else "measured"
                    if plan := replies[0].get("plan"):
                        plans[current] = plan
                    tell(f"{line.name}: {current}: {status[current]}")
                    for words in replies[0].get("words", "").splitlines():
                        tell(f"    {words}")
                ready = [side for side in ready if status[side] == "measured"]
                for unit in range(num_units):
                    for current in _round(line, ready):
                        turns += _quiet_turn(stage, line, current, unit, patience_s)
                    others = max(t["foreign_share"] for t in turns if t["unit"] == unit)
                    tell(f"{line.name}: unit {unit + 1}, others used up to {others:.0%}")
            return {"sides": status, "plans": plans, "turns": turns}
        except WorkersLostError as error:
            if not current:
                raise
            status[current] = f"ended the workers: {str(error)[-600:]}"
            tell(f"{line.name}: {current}: {status[current]}")


def _round(line: Line, ready: list[str]) -> list[str]:
    """Whose turn it is, one after another: the baseline before every few of the others."""
    others = [side for side in ready if side != line.baseline]
    order: list[str] = []
    for index, side in enumerate(others):
        if line.baseline in ready and index % line.baseline_every == 0:
            order.append(str(line.baseline))
        order.append(side)
    return order or ready


def _quiet_turn(
    stage: Stage, line: Line, name: str, unit: int, patience_s: float
) -> list[dict[str, Any]]:
    """A turn, and more if others used the processors meanwhile."""
    turns: list[dict[str, Any]] = []
    for _ in range(MOST_TURNS if patience_s else 1):
        _wait_for_quiet(patience_s)
        turns.append(_turn(stage, line, name, unit))
        if turns[-1]["foreign_share"] <= QUIET_SHARE:
            break
    return turns


def _wait_for_quiet(patience_s: float) -> None:
    """Return when others leave the processors alone, or when patience is at its end."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        clock, busy = time.monotonic(), _busy_s()
        time.sleep(0.25)
        share = (_busy_s() - busy) / ((time.monotonic() - clock) * (os.cpu_count() or 1))
        if share <= QUIET_SHARE:
            return


def _turn(stage: Stage, line: Line, name: str, unit: int) -> dict[str, Any]:
    side = SIDES[name]
    steps = line.steps.get(name, side.steps)
    before = stage.bytes_over_links()
    clock, busy = time.monotonic(), _busy_s()
    replies = stage.crew_of(name).tell("turn", side=name, lead_steps=side.lead_steps, steps=steps)
    busy, clock = _busy_s() - busy, time.monotonic() - clock
    after = stage.bytes_over_links()
    foreign_s = max(0.0, busy - sum(reply["busy_s"] for reply in replies))
    speeds = [1 / reply["seconds"] for reply in replies]
    num_all = steps + side.lead_steps
    means = {
        key: sum(reply[key] for reply in replies) / len(replies)
        for key in ("main_thread_s", "all_threads_s", "page_faults")
    }
    return {
        "side": name,
        "unit": unit,
        # What all workers together need per step of each: the reciprocal of their mean speed.
        "seconds": len(speeds) / sum(speeds),
        **means,
        "foreign_share": foreign_s / (clock * (os.cpu_count() or 1)),
        "link_bytes": max(b - a for a, b in zip(before, after, strict=True)) / num_all,
    }


def _busy_s() -> float:
    """Seconds that all processors together have spent in programs or lost to other guests.

    Interrupts do not count: packets come in there.
    """
    first = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _, _, _, _, steal = map(int, first[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
