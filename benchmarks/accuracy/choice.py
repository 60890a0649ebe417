"""Learning rates of block schedules, chosen on images and seeds that the table does not use.

The table (`bars.py`) evaluates on the test images. A rate must not be evaluated on the data that
selected it, so the choice is a separate task with its own seeds: MNIST without its last 10,000
*training* images, which are used as test images. Everything below was fixed before the first run:

- the candidates: fractions of the baseline's rate, from 1 to 1/7, which the long-term updates of
  DiLoCo suggest (1/3 for block momentum);
- the runs: float32 without overlap; the other variants of a schedule use the same rate;
- the length: whole blocks only, so that the choice does not depend on how a partial block counts;
- the rule: the highest mean accuracy over the seeds, and the larger rate in a tie.

`bench_accuracy.py --choose` carries the runs out and keeps them in `records/accuracy_choice.jsonl`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from record import Bar

from accuracy.runs import Key, Run
from accuracy.sides import BLOCK_STEPS, SIDES, Side
from accuracy.tasks import TASKS

SCHEDULES = ("block momentum", "DiLoCo")
CANDIDATES = tuple(Fraction(text) for text in ("1", "1/2", "1/3", "1/4", "1/7"))


def _name(schedule: str, factor: Fraction) -> str:
    return f"{schedule} at {factor} of the rate"


def _candidate(schedule: str, factor: Fraction) -> Side:
    return replace(
        SIDES[schedule],
        name=_name(schedule, factor),
        learning_rate_factor=float(factor),
        note="",
        rate_of=None,
    )


CANDIDATE_SIDES = {
    side.name: side
    for side in (_candidate(schedule, factor) for schedule in SCHEDULES for factor in CANDIDATES)
}
TASK = replace(
    TASKS["mnist"],
    name="mnist, held out",
    held_out=10_000,
    seeds=(100, 101, 102),
    fresh_seeds=(),
    sides=tuple(CANDIDATE_SIDES),
    max_steps=73 * BLOCK_STEPS,  # of 1170
)


def chosen(runs: Mapping[Key, Run]) -> dict[str, Fraction]:
    """The factor of each schedule's rate; a schedule with runs missing has none."""
    factors = {}
    for schedule in SCHEDULES:
        means = {factor: _accuracy(runs, schedule, factor) for factor in CANDIDATES}
        if not any(math.isnan(mean) for mean in means.values()):
            factors[schedule] = max(CANDIDATES, key=lambda factor: (means[factor], factor))
    return factors


def _accuracy(runs: Mapping[Key, Run], schedule: str, factor: Fraction) -> float:
    """The mean over all seeds; a candidate that diverged has none correct; NaN: runs missing."""
    own = [runs.get((TASK.name, _name(schedule, factor), seed)) for seed in TASK.seeds]
    if any(run is None or run.status == "not built" for run in own):
        return math.nan
    return statistics.mean(run.accuracy if run.status == "done" else 0.0 for run in own if run)


def choice_bars(runs: Mapping[Key, Run]) -> list[Bar]:
    """What each candidate reached, and whether `sides.py` has the chosen one."""
    bars = []
    factors = chosen(runs)
    for schedule in SCHEDULES:
        for factor in CANDIDATES:
            name = _name(schedule, factor)
            found = [runs.get((TASK.name, name, seed)) for seed in TASK.seeds]
            samples = [run.accuracy for run in found if run is not None and run.status == "done"]
            mean = _accuracy(runs, schedule, factor)
            mark = ": chosen" if factors.get(schedule) == factor else ""
            spread = (min(samples), max(samples)) if samples else None
            bars.append(
                Bar(f"{TASK.name}: {name}{mark}", mean, "%", samples=samples, interval=spread)
            )
        bars.append(_agreement_bar(schedule, factors.get(schedule)))
    return bars


def _agreement_bar(schedule: str, factor: Fraction | None) -> Bar:
    """Held if the table's rate is the chosen one; missing as long as runs are."""
    name = f"{schedule}: rate in the table, as a share of the baseline's"
    used = SIDES[schedule].learning_rate_factor
    if factor is None:
        return Bar(f"{name}: missing (not all candidates were run)", math.nan, "", "chosen", None)
    return Bar(name, used, "", f"= {factor}", used == float(factor))
