"""The settings of each side, chosen by runs on `settings.TUNED`; fixed before the first run:

- DDP has the learning rate with the lowest loss after `NUM_STEPS` steps. That loss is the goal of a
  text; for the compared text it is DDP's at the chosen rate, with a seed that is not compared.
- Any other family has the candidate that reached the goal in the fewest seconds over the link.
- Limits are for the family of ours that was faster there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from time_to_loss import settings
from time_to_loss.runs import Run, of_side
from time_to_loss.settings import CANDIDATES, DDP, FAST_RATE, RATE, TUNED, Side, Text


def loss_of_ddp(runs: Sequence[Run], side: Side, text: Text) -> float | None:
    """The loss after `NUM_STEPS` steps with the goal's seed; None: it was not run."""
    found = of_side(runs, side, text, FAST_RATE, goal=0.0).get(text.goal_seed, ())
    losses = [run["curve"][-1][2] for run in found if run["curve"][-1][0] == settings.NUM_STEPS]
    return losses[0] if losses else None


def chosen_ddp(runs: Sequence[Run]) -> Side | None:
    """None: not all rates were run."""
    losses = {side.name: loss_of_ddp(runs, side, TUNED) for side in DDP}
    known = {name: loss for name, loss in losses.items() if loss is not None}
    if len(known) < len(DDP):
        return None
    return min(DDP, key=lambda side: known[side.name])


def goal_of(runs: Sequence[Run], text: Text) -> float | None:
    """The loss to reach, rounded up to a thousandth; None: runs are missing."""
    side = chosen_ddp(runs)
    loss = None if side is None else loss_of_ddp(runs, side, text)
    return None if loss is None else round(loss + 0.0005, 3)


def seconds_of(runs: Sequence[Run], side: Side) -> float | None:
    """The median over seeds of the newest undisturbed run of each, for machines change their speed.

    Infinite if one did not reach the goal; None: no runs.
    """
    goal = goal_of(runs, TUNED)
    if goal is None:
        return None
    by_seed = of_side(runs, side, TUNED, RATE, goal)
    found = [same[-1]["seconds"] for same in by_seed.values()]
    if not found:
        return None
    return float("inf") if None in found else statistics.median(found)


def chosen(runs: Sequence[Run]) -> dict[str, Side]:
    """The side of each family; a family of which a candidate was not run has none."""
    sides: dict[str, Side] = {}
    if (of_ddp := chosen_ddp(runs)) is not None:
        sides["ddp"] = of_ddp
        sides["ddp fp16"] = settings.ddp(of_ddp.learning_rate, "fp16")
    for family in dict.fromkeys(side.family for side in CANDIDATES):
        own = {side.name: seconds_of(runs, side) for side in CANDIDATES if side.family == family}
        known = {name: seconds for name, seconds in own.items() if seconds is not None}
        if len(known) == len(own) and min(known.values()) < float("inf"):
            best = min(known, key=lambda name: known[name])
            sides[family] = next(side for side in CANDIDATES if side.name == best)
    return sides


def ours(runs: Sequence[Run], sides: Iterable[Side]) -> str | None:
    """The family of ours that limits are for; None: nothing of ours was chosen."""
    seconds = {
        side.family: seconds_of(runs, side) for side in sides if side.family in settings.OURS
    }
    known = {family: value for family, value in seconds.items() if value is not None}
    return min(known, key=lambda family: known[family]) if known else None
