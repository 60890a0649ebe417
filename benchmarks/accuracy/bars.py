"""From runs to the bars of the report: differences from the baseline, paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exchange.runs import RECORD, load
from record import Bar

from accuracy.runs import Key, Run
from accuracy.sides import BASELINE, SIDES, Side
from accuracy.step_times import step_times
from accuracy.tasks import TASKS, Task

MNIST_POINTS = 0.2
CIFAR_POINTS = 1.5
LOSS_SHARE = 0.05
GOAL_STEPS = 8
SPEED_UP = 5.0

Runs = Mapping[Key, Run]


def bars_of(runs: Runs) -> list[Bar]:
    """The bars of all tasks, in the order of the table."""
    bars: list[Bar] = []
    for task in TASKS.values():
        if not any(key[0] == task.name for key in runs):
            bars.append(_missing(f"{task.name}: all", "no runs"))
        elif task.goal is not None:
            bars += _goal_bars(task, runs)
        else:
            bars.append(_baseline_bar(task, runs))
            for name in task.sides:
                if name != BASELINE:
                    bars += _side_bars(task, SIDES[name], runs)
    return bars


def failed_limits(runs: Runs) -> dict[str, str]:
    """By side, its first limit that is not met or not measured; "" if it passes.

    The baseline always passes.
    """
    return {side.name: _first_reason(side, runs) for side in SIDES.values()}


def _first_reason(side: Side, runs: Runs) -> str:
    for task in TASKS.values():
        if side.name == BASELINE or task.goal is not None or side.name not in task.sides:
            continue
        for bar in _side_bars(task, side, runs):
            if bar.limit and bar.holds is not True:
                return _why_odd(task.name, bar)
    return ""


def _why_odd(task: str, bar: Bar) -> str:
    if bar.holds is None:
        return f"{task}: not measured"
    return f"{task}: {bar.value:.2f} {bar.unit} instead of {bar.limit}"


# ---- accuracy at the end ----


@dataclass(frozen=True)
class Pairs:
    """A side and the baseline, for the seeds that both have."""

    points: list[float]
    """Accuracy of the side less that of the baseline."""
    losses: list[float]
    """Training loss of the side over that of the baseline."""
    missing: str
    """What is missing for a result, empty if nothing."""


def pairs_of(task: Task, side: str, runs: Runs) -> Pairs:
    """The pairs of all seeds with which the side is evaluated."""
    seeds = task.seeds_of(side)
    pairs = [
        (runs.get((task.name, side, seed)), runs.get((task.name, BASELINE, seed))) for seed in seeds
    ]
    whole = [
        (own, base)
        for own, base in pairs
        if own is not None and base is not None and own.status == base.status == "done"
    ]
    return Pairs(
        [own.accuracy - base.accuracy for own, base in whole],
        [own.loss / base.loss for own, base in whole],
        _why_missing([own for own, _ in pairs], len(whole)),
    )


def _why_missing(own: Sequence[Run | None], num_pairs: int) -> str:
    odd = [run for run in own if run is not None and run.status != "done"]
    if odd:
        return f"seed {odd[0].seed} {odd[0].status}: {odd[0].why.splitlines()[0][:60]}"
    if num_pairs < len(own):
        return f"{num_pairs} of {len(own)} seeds"
    return ""


def interval_of(samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean by Student's t; None of one sample alone."""
    from scipy.stats import ttest_1samp

    if len(samples) < 2:
        return None
    if len(set(samples)) == 1:
        return samples[0], samples[0]
    low, high = ttest_1samp(samples, 0.0).confidence_interval(0.95)
    return float(low), float(high)


def _baseline_bar(task: Task, runs: Runs) -> Bar:
    done = [run for run in runs.values() if (run.task, run.side) == (task.name, BASELINE)]
    samples = [run.accuracy for run in done if run.status == "done"]
    name = f"{task.name}: {BASELINE}, float32: accuracy"
    if not samples:
        return _missing(name, "not run")
    return Bar(name, statistics.mean(samples), "%", samples=samples, interval=interval_of(samples))


def _side_bars(task: Task, side: Side, runs: Runs) -> list[Bar]:
    pairs = pairs_of(task, side.name, runs)
    missing = pairs.missing
    name = f"{task.name}: {side.name}" + (f" ({side.note})" if side.note else "")
    is_cifar = task.name == "cifar"
    is_held = not (is_cifar and side.is_asynchronous)
    limit: str | None = f"> -{CIFAR_POINTS}, 0 in reach" if is_cifar else f">= -{MNIST_POINTS}"
    if not is_held:
        limit = None
    if not pairs.points:
        return [_missing(name, missing, limit)]
    mean, interval = statistics.mean(pairs.points), interval_of(pairs.points)
    holds: bool | None = None
    if is_held and not missing:
        if is_cifar:
            holds = mean > -CIFAR_POINTS and interval is not None and interval[1] >= 0
        else:
            holds = mean >= -MNIST_POINTS
    label = f"{name}: {missing}" if missing else name
    bars = [
        Bar(label, mean, "points", limit, holds, pairs.points, interval),
    ]
    if is_cifar:
        share = statistics.mean(pairs.losses)
        holds = None if not is_held or missing else share <= 1 + LOSS_SHARE
        text = f"<= {1 + LOSS_SHARE:g}" if is_held else None
        bars.append(
            Bar(f"{task.name}: {side.name}, training loss / baseline", share, "x", text, holds,
                pairs.losses, interval_of(pairs.losses))
        )  # fmt: skip
    if side.is_asynchronous:
        bars += _staleness_bars(task, side, runs)
    return bars


def _staleness_bars(task: Task, side: Side, runs: Runs) -> list[Bar]:
    met = [
        run.staleness
        for run in runs.values()
        if (run.task, run.side) == (task.name, side.name) and run.staleness
    ]
    if not met:
        return []
    means = [one["mean"] for one in met]
    worst = max(one["max"] for one in met)
    bound = met[0]["bound in steps"]
    name = f"{task.name}: {side.name}, staleness, max {worst:g}; bound {bound:g} steps ahead"
    return [Bar(name, statistics.mean(means), "updates", samples=means)]


# ---- time to a fixed accuracy ----


def steps_to_goal(task: Task, run: Run) -> float:
    """The first step at which the last 8 have, on average, the goal's accuracy; or infinity.

    The accuracy is that of each batch before it is learned, by the models of the workers.
    """
    for end in range(GOAL_STEPS, len(run.hits) + 1):
        if statistics.mean(run.hits[end - GOAL_STEPS : end]) >= (task.goal or 0.0):
            return end
    return math.inf


def _goal_bars(task: Task, runs: Runs) -> list[Bar]:
    """Steps to the goal times step time, of DDP over ours. DDP takes the baseline's steps."""
    times = step_times(load(RECORD))
    bars: list[Bar] = []
    ratios: dict[str, tuple[float, float]] = {}
    baseline: dict[int, float] = {}
    for name in task.sides:
        done = {
            seed: steps_to_goal(task, run)
            for seed in task.seeds_of(name)
            if (run := runs.get((task.name, name, seed))) is not None and run.status == "done"
        }
        label = f"{task.name}: {name}: steps to {task.goal:g} %"
        if not done:
            own = [runs.get((task.name, name, seed)) for seed in task.seeds_of(name)]
            bars.append(_missing(label, _why_missing(own, 0)))
            continue
        bars.append(Bar(label, statistics.mean(done.values()), "steps", samples=[*done.values()]))
        if name == BASELINE:
            baseline = done
        elif name in times and "ddp" in times and baseline.keys() == done.keys():
            ratios[name] = (
                statistics.mean(baseline.values()) * times["ddp"],
                statistics.mean(done.values()) * times[name],
            )
    limit = f">= {SPEED_UP:g}"
    if not ratios:
        why = "no step times in records/exchange.jsonl" if "ddp" not in times else "no runs"
        return [*bars, _missing("time to accuracy at 100 Mb/s: ddp / best", why, limit)]
    best = max(ratios, key=lambda name: ratios[name][0] / ratios[name][1])
    for name, (theirs, ours) in ratios.items():
        value = theirs / ours
        is_best = name == best
        bars.append(
            Bar(f"time to {task.goal:g} % at 100 Mb/s: ddp / {name}", value, "x",
                limit if is_best else None, value >= SPEED_UP if is_best else None)
        )  # fmt: skip
    return bars


def _missing(name: str, why: str, limit: str | None = None) -> Bar:
    return Bar(f"{name}: missing ({why})", math.nan, "", limit, None)
