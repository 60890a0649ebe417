"""Which sides count: the speed of a codec or schedule that trains worse is worth nothing.

A side counts only if it passes the accuracy table (`make bench-accuracy`). A side that fails there
or was not measured is shown with the reason and satisfies no limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from accuracy.sides import SIDES as ACCURACY_SIDES

from exchange.runs import Run
from exchange.table import SIDES, Side

NOT_COUNTED = "not counted: no accuracy"
Exclusion = Callable[[str, Run], str]
"""From a side's name and a run to the reason why the side does not count there; "" if it does."""


def exclusions_from(failed_limits: Mapping[str, str]) -> Exclusion:
    """By the limits that the sides of the accuracy table fail, "" where they fail none."""

    def exclusion(side: str, run: Run) -> str:
        for name in _must_pass(SIDES[side], run):
            if reason := failed_limits.get(name, "not measured"):
                return f"{NOT_COUNTED} ({reason})"
        return ""

    return exclusion


def _must_pass(side: Side, run: Run) -> tuple[str, ...]:
    if side.accuracy is not None:
        return side.accuracy
    plan = run.get("plans", {}).get(side.name)
    return (_name_of(plan) if plan else "a plan that the run does not record",)


def _name_of(plan: Mapping[str, str]) -> str:
    """The side of the accuracy table that trains by a plan of `auto`; "" if there is none."""
    codec = None if plan["codec"] == "float32" else plan["codec"]
    for side in ACCURACY_SIDES.values():
        if (side.schedule, side.codec, side.block_steps) == (plan["schedule"], codec, None):
            return side.name
    return ""
