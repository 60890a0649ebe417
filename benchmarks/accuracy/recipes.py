"""Recipes for schedules whose exchange overlaps: chosen on one network, evaluated on another.

The choice is made on `PlainNet`, which has no shortcuts, with the CIFAR subset without its last
2,000 *training* images, which take the place of the test images, and with seeds that evaluate
nothing. The evaluation is made on `ResidualNet`, all training images, the test images and five
seeds that nothing was run with before. Fixed before the first run of the choice:

- the candidates below, with the baseline's rate, batch and number of samples; blocks have 16 steps
  and an exchange takes 6 of them;
- the rule: the lowest mean loss on the held-out images over the seeds, the earlier one in a tie.

Double buffering at 5/4 of the rate was a candidate too, and had the lowest loss (1.008 in place of
1.012 times that of every step). It was excluded before the first run of the evaluation: the rate is
that of `ResidualNet`, and every step gains from a higher one on `PlainNet` as well.

`bench_recipes.py --part schedules --choose` executes the choice, without ``--choose`` the
evaluation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from record import Bar

from accuracy.bars import interval_of, pairs_of
from accuracy.networks import PlainNet
from accuracy.runs import Key, Run
from accuracy.sides import BASELINE, BLOCK_STEPS, OVERLAP_STEPS, SIDES, Side
from accuracy.tasks import TASKS

POINTS = 0.5
LOSS_SHARE = 1.05

# ---- the choice ----


def _blocks(name: str, schedule: str, **options: object) -> Side:
    return Side(
        name=name,
        schedule=schedule,
        options={"overlap_steps": OVERLAP_STEPS, **options},
        block_steps=BLOCK_STEPS,
    )


def _diloco(rate: float, momentum: float, *, eager: bool) -> Side:
    return _blocks(
        f"DiLoCo, outer rate {rate}, momentum {momentum}{', eager' if eager else ''}",
        "diloco",
        outer_rate=rate,
        outer_momentum=momentum,
        eager=eager,
    )


def _eager_buffering(name: str, factor: float) -> Side:
    options = {"eager": True}
    return Side(
        name=name, schedule="double_buffering", options=options, learning_rate_factor=factor
    )


CANDIDATES: Mapping[str, tuple[Side, ...]] = {
    "double buffering": (
        SIDES["double buffering"],
        _eager_buffering("double buffering, eager", 1.0),
        _eager_buffering("double buffering, eager, rate x 5/4", 1.25),
    ),
    "DiLoCo": (
        _diloco(0.7, 0.9, eager=False),
        _diloco(0.7, 0.5, eager=False),
        *(
            _diloco(rate, momentum, eager=True)
            for rate, momentum in ((0.7, 0.9), (0.7, 0.8), (0.7, 0.7), (0.6, 0.85), (0.8, 0.8))
        ),
    ),
    "block momentum": tuple(
        _blocks(
            f"block momentum{', eager' * eager}{', inner momentum kept' * (not resets)}",
            "block_momentum",
            eager=eager,
            reset_sgd_momentum_after_aggregation=resets,
        )
        for eager, resets in ((False, True), (True, True), (True, False))
    ),
}


def _later(name: str, schedule: str, block_steps: int = BLOCK_STEPS, **options: object) -> Side:
    return Side(name=name, schedule=schedule, options=options, block_steps=block_steps)


GROWTH = {"block_steps": 10, "grows_below": 0.5}
"""Blocks of 10 steps that grow once the rate is half the highest: with the rate of these tasks
about as many exchanges as blocks of 16 steps."""
OVERLAP = {"overlap_steps": OVERLAP_STEPS}

LATER_CANDIDATES: Mapping[str, tuple[Side, ...]] = {
    "delay compensation": tuple(
        Side(
            name=f"double buffering, delay compensation {factor}",
            schedule="double_buffering",
            options={"delay_compensation": factor},
        )
        for factor in (1, 64)
    ),
    "periodic average": (
        _later("periodic average, 16 steps", "periodic_average"),
        _later("periodic average, growing", "periodic_average", **GROWTH),
        _later("periodic average, every step at first", "periodic_average", every_step_until=0.1),
        _later("periodic average, every step at the end", "periodic_average", every_step_from=0.9),
    ),
    "block momentum": (
        _later("block momentum, not nesterov", "block_momentum", nesterov=False, **OVERLAP),
        _later("block momentum, growing", "block_momentum", **GROWTH, **OVERLAP),
        _later(
            "block momentum, every step at the end",
            "block_momentum",
            every_step_from=0.9,
            **OVERLAP,
        ),
        _later(
            "block momentum, every step first and last",
            "block_momentum",
            every_step_until=0.1,
            every_step_from=0.9,
            **OVERLAP,
        ),
    ),
    "DiLoCo": (
        _later(
            "DiLoCo recommended, every step at the end",
            "diloco",
            recommended=True,
            every_step_from=0.9,
        ),
    ),
}
"""A second round, after the recipes for double buffering and DiLoCo were evaluated: blocks that
grow, phases of every step (a tenth of the samples each), delay compensation. Fixed before its first
run, with the rule: block momentum gets a recipe if one of these has less than 1.03 times the loss
of every step, where the best until then had 1.047; nothing replaces the evaluated recipes."""
CHOICE_SIDES = {
    side.name: side
    for side in (
        SIDES[BASELINE],
        *(side for sides in CANDIDATES.values() for side in sides),
        *(side for sides in LATER_CANDIDATES.values() for side in sides),
    )
}
CHOICE_TASK = replace(
    TASKS["cifar"],
    name="cifar, another network, held out",
    network=PlainNet,
    held_out=2_000,
    epochs=15,  # 1,875 steps; the evaluation has 1,872
    seeds=(200, 201),
    fresh_seeds=(),
    sides=tuple(CHOICE_SIDES),
)


def chosen(runs: Mapping[Key, Run]) -> dict[str, Side]:
    """The chosen candidate of each schedule; none while runs are missing."""
    found = {}
    for schedule, all_candidates in CANDIDATES.items():
        candidates = [side for side in all_candidates if side.learning_rate_factor == 1]
        losses = {side.name: _mean_loss(runs, side) for side in candidates}
        if not any(math.isnan(loss) for loss in losses.values()):
            found[schedule] = min(candidates, key=lambda side: losses[side.name])
    return found


def _mean_loss(runs: Mapping[Key, Run], side: Side) -> float:
    own = [runs.get((CHOICE_TASK.name, side.name, seed)) for seed in CHOICE_TASK.seeds]
    if any(run is None or run.status == "not built" for run in own):
        return math.nan
    return statistics.mean(
        run.test_loss if run.status == "done" else math.inf for run in own if run
    )


def relative_losses(runs: Mapping[Key, Run]) -> dict[str, float]:
    """The mean loss of each candidate over that of every step; NaN while runs are missing."""
    base = _mean_loss(runs, SIDES[BASELINE])
    candidates = (*CANDIDATES.values(), *LATER_CANDIDATES.values())
    return {side.name: _mean_loss(runs, side) / base for sides in candidates for side in sides}


def choice_bars(runs: Mapping[Key, Run]) -> list[Bar]:
    """What each candidate of both rounds reached, relative to every step with the same seeds."""
    best = {side.name for side in chosen(runs).values()}
    base = _mean_loss(runs, SIDES[BASELINE])
    bars = [Bar(f"{CHOICE_TASK.name}: {BASELINE}: loss on held-out images", base, "")]
    for name, loss in relative_losses(runs).items():
        mark = ": chosen" if name in best else ""
        bars.append(Bar(f"{name}{mark}: loss / {BASELINE}", loss, "x"))
    return bars


# ---- the evaluation ----


def _recommended(name: str, schedule: str, codec: str | None, block_steps: int | None) -> Side:
    return Side(
        name=f"{name}{f' {codec}' if codec else ''}, recommended",
        schedule=schedule,
        codec=codec,
        options={"recommended": True},
        block_steps=block_steps,
    )


_FIRST_AND_LAST = CHOICE_SIDES["block momentum, every step first and last"]
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
        _FIRST_AND_LAST,
        replace(_FIRST_AND_LAST, name=f"{_FIRST_AND_LAST.name}, int8", codec="int8"),
    )
}
"""The chosen ones. Block momentum with every step first and last has a side here because it was
below its limit in the choice; it is recommended only if it is within the limits here as well."""
RECIPE_TASK = replace(
    TASKS["cifar"],
    name="cifar, recipes",
    seeds=(20, 21, 22, 23, 24),
    fresh_seeds=(),
    sides=tuple(RECIPE_SIDES),
)


def failed_recipes(runs: Mapping[Key, Run]) -> dict[str, str]:
    """By recipe, its first limit that is not met or not measured; "" if it passes."""
    failed = dict.fromkeys(RECIPE_TASK.sides[1:], "")
    bars = recipe_bars(runs)
    for name in failed:
        own = [bar for bar in bars if bar.bar.startswith(f"{RECIPE_TASK.name}: {name}")]
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
        pairs = pairs_of(RECIPE_TASK, name, runs)
        points, losses = f"> -{POINTS}, 0 in reach", f"<= {LOSS_SHARE}"
        label = f"{RECIPE_TASK.name}: {name}"
        if not pairs.points:
            bars.append(Bar(f"{label}: missing ({pairs.missing})", math.nan, "", points))
            continue
        mean, interval = statistics.mean(pairs.points), interval_of(pairs.points)
        share = statistics.mean(pairs.losses)
        is_whole = not pairs.missing
        holds = mean > -POINTS and interval is not None and interval[1] >= 0 if is_whole else None
        bars.append(Bar(label, mean, "points", points, holds, pairs.points, interval))
        bars.append(
            Bar(f"{label}, training loss / {BASELINE}", share, "x", losses,
                share <= LOSS_SHARE if is_whole else None, pairs.losses, interval_of(pairs.losses))
        )  # fmt: skip
    return bars
