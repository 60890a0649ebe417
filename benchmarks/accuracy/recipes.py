"""Recipes for schedules whose exchange overlaps, evaluated on `ResidualNet`.

All training images, the test images, and 16 seeds that nothing was run with before. What is
evaluated was chosen on another network without shortcuts, on held-out training images and with
other seeds, by the lowest mean loss; the runs of that choice are `recipe_choice.jsonl` in the
archive of the records. Some sides have only the five seeds of an earlier evaluation, which is too
few: DiLoCo with int8 was 0.3 points above every step with these and 0.6 below it with the 16.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from record import Bar

from accuracy.bars import interval_of, pairs_of
from accuracy.runs import Key, Run
from accuracy.sides import BASELINE, BLOCK_STEPS, SIDES, Side
from accuracy.tasks import TASKS

SEEDS = tuple(range(301, 317))
EARLIER_SEEDS = (20, 21, 22, 23, 24)
POINTS = 0.5
LOSS_SHARE = 1.05


def _recommended(name: str, schedule: str, codec: str | None, block_steps: int | None) -> Side:
    return Side(
        name=f"{name}{f' {codec}' if codec else ''}, recommended",
        schedule=schedule,
        codec=codec,
        options={"recommended": True},
        block_steps=block_steps,
    )


RECIPE_SIDES = {
    side.name: side
    for side in (
        SIDES[BASELINE],
        *(
            _recommended(name, schedule, codec, block_steps)
            for name, schedule, block_steps in (
                ("double buffering", "double_buffering", None),
                ("DiLoCo", "diloco", BLOCK_STEPS),
            )
            for codec in (None, "int8")
        ),
    )
}
"""The chosen ones."""
SEEDS_OF = {
    "DiLoCo int8, recommended": SEEDS,
    "double buffering int8, recommended": (*range(301, 306), *range(309, 314)),
}
"""The seeds with which a side was evaluated, `EARLIER_SEEDS` if it is not here. Two processes began
at 301 and 309; double buffering was stopped by the time, not by what it showed."""
RECIPE_TASK = replace(
    TASKS["cifar"],
    name="cifar, recipes",
    seeds=SEEDS,
    fresh_seeds=(),
    sides=tuple(RECIPE_SIDES),
)


def failed_recipes(runs: Mapping[Key, Run]) -> dict[str, str]:
    """By recipe, its first limit that is not met or not measured; "" if it passes."""
    failed = dict.fromkeys(RECIPE_TASK.sides[1:], "")
    bars = recipe_bars(runs)
    for name in failed:
        own = [bar for bar in bars if bar.bar.startswith(f"{RECIPE_TASK.name}: {name} (")]
        for bar in own:
            if bar.holds is not True and not failed[name]:
                failed[name] = f"{RECIPE_TASK.name}: {bar.value:.2f} {bar.unit}, not {bar.limit}"
    return failed


def recipe_bars(runs: Mapping[Key, Run]) -> list[Bar]:
    """Each recipe less every step with the same seed: points, and shares of the training loss."""
    bars = []
    for name in RECIPE_TASK.sides:
        if name == BASELINE:
            continue
        seeds = SEEDS_OF.get(name, EARLIER_SEEDS)
        pairs = pairs_of(replace(RECIPE_TASK, seeds=seeds), name, runs)
        points, losses = f"> -{POINTS} with 95 %", f"<= {LOSS_SHARE}"
        label = f"{RECIPE_TASK.name}: {name} ({len(seeds)} seeds)"
        if not pairs.points:
            bars.append(Bar(f"{label}: missing ({pairs.missing})", math.nan, "", points))
            continue
        mean, interval = statistics.mean(pairs.points), interval_of(pairs.points)
        share = statistics.mean(pairs.losses)
        is_whole = not pairs.missing
        holds = interval is not None and interval[0] > -POINTS if is_whole else None
        bars.append(Bar(label, mean, "points", points, holds, pairs.points, interval))
        bars.append(
            Bar(f"{label}, training loss / {BASELINE}", share, "x", losses,
                share <= LOSS_SHARE if is_whole else None, pairs.losses, interval_of(pairs.losses))
        )  # fmt: skip
    return bars
