"""Has the workers of a line build and time their sides in turns, and collects the results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exchange.deployment import Deployment, WorkersLostError, deployed, why_missing
from exchange.table import SIDES, Line

QUIET_SHARE = 0.04
"""Of all processors. A turn during which other programs used more is repeated, and counts only if
too few turns remain without it.
"""
MAX_TURNS = 3


def measure(
    line: Line,
    wanted: list[str],
    log: Callable[[str], None],
    *,
    num_units: int,
    quiet_timeout_s: float,
) -> dict[str, Any]:
    """The turns of a line, the status of each side, and what `auto` has chosen.

    Before each turn it waits up to ``quiet_timeout_s`` until other programs leave the processors
    idle, and repeats turns that they disturbed; with 0 it accepts every turn. A side that ends the
    workers is left out and the line is measured again from scratch with the others.

    Raises WorkersLostError: the workers ended before any side was built.
    """
    status: dict[str, str] = {}
    plans: dict[str, dict[str, str]] = {}
    for side in wanted:
        if reason := why_missing(SIDES[side].runtime):
            status[side] = f"not built: {reason}"
            log(f"{line.name}: {side}: {status[side]}")
    while True:
        ready = [side for side in wanted if status.get(side, "measured") == "measured"]
        turns: list[dict[str, Any]] = []
        current = ""
        try:
            with deployed(line, {SIDES[side].runtime for side in ready}) as deployment:
                for current in ready:
                    replies = deployment.workers_of(current).request("build", side=current)
                    refused = [reply["not_built"] for reply in replies if "not_built" in reply]
                    status[current] = f"not built: {refused[0]}" if refused else "measured"
                    if plan := replies[0].get("plan"):
                        plans[current] = plan
                    log(f"{line.name}: {current}: {status[current]}")
                    for note in replies[0].get("notes", "").splitlines():
                        log(f"    {note}")
                ready = [side for side in ready if status[side] == "measured"]
                for unit in range(num_units):
                    for current in _round(line, ready):
                        turns += _undisturbed_turn(deployment, line, current, unit, quiet_timeout_s)
                    others = max(t["foreign_share"] for t in turns if t["unit"] == unit)
                    log(f"{line.name}: unit {unit + 1}, others used up to {others:.0%}")
            return {"sides": status, "plans": plans, "turns": turns}
        except WorkersLostError as error:
            if not current:
                raise
            status[current] = f"ended the workers: {str(error)[-600:]}"
            log(f"{line.name}: {current}: {status[current]}")


def _round(line: Line, ready: list[str]) -> list[str]:
    """The order of turns in one unit: the baseline before every ``baseline_every``-th side."""
    others = [side for side in ready if side != line.baseline]
    order: list[str] = []
    for index, side in enumerate(others):
        if line.baseline in ready and index % line.baseline_every == 0:
            order.append(str(line.baseline))
        order.append(side)
    return order or ready


def _undisturbed_turn(
    deployment: Deployment, line: Line, name: str, unit: int, quiet_timeout_s: float
) -> list[dict[str, Any]]:
    """A turn, repeated if other programs used the processors meanwhile."""
    turns: list[dict[str, Any]] = []
    for _ in range(MAX_TURNS if quiet_timeout_s else 1):
        wait_for_quiet(quiet_timeout_s)
        turns.append(turn(deployment, line, name, unit))
        if turns[-1]["foreign_share"] <= QUIET_SHARE:
            break
    return turns


def wait_for_quiet(quiet_timeout_s: float) -> None:
    """Return when other programs leave the processors idle, or after the time-out."""
    deadline = time.monotonic() + quiet_timeout_s
    while time.monotonic() < deadline:
        clock, busy = time.monotonic(), busy_s()
        time.sleep(0.25)
        share = (busy_s() - busy) / ((time.monotonic() - clock) * (os.cpu_count() or 1))
        if share <= QUIET_SHARE:
            return


def turn(deployment: Deployment, line: Line, name: str, unit: int) -> dict[str, Any]:
    """One turn of a side that was built."""
    side = SIDES[name]
    steps = line.steps.get(name, side.steps)
    before = deployment.bytes_over_links()
    clock, busy = time.monotonic(), busy_s()
    replies = deployment.workers_of(name).request(
        "turn", side=name, lead_steps=side.lead_steps, steps=steps
    )
    busy, clock = busy_s() - busy, time.monotonic() - clock
    after = deployment.bytes_over_links()
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
        # The reciprocal of the mean speed of the workers.
        "seconds": len(speeds) / sum(speeds),
        **means,
        "foreign_share": foreign_s / (clock * (os.cpu_count() or 1)),
        "link_bytes": max(b - a for a, b in zip(before, after, strict=True)) / num_all,
    }


def busy_s() -> float:
    """Seconds that all processors have spent in programs or lost to other virtual machines.

    Interrupts are left out: they include the packets of the workers themselves.
    """
    first = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _, _, _, _, steal = map(int, first[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
