"""What the gradient noise scale predicts, and what the runs show.

McCandlish et al. 2018, arXiv 1812.06162, equation 2.11: with the critical batch B, a batch of n
samples needs ``1 + n / B`` times the samples that the smallest batches need for the same loss.
So K times the base batch b has the efficiency, relative to the base batch,

    (1 + b / B) / (1 + K b / B)

which is near 1 as long as K b is far below B, and b / B + 1/K far above it. The noise scale,
measured by `GradientNoiseScale` on two real workers, predicts B (section 2.2): its median over the
samples before the first fall of the rate. Measured is the efficiency by the samples until the
training loss is what the base batch has after `TARGET_SHARE` of all samples: those of the base
batch over those of the recipe that needs the fewest. The curves are means over the seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accuracy.runs import Key

from large_batch.runs import NUM_POINTS, LargeRun
from large_batch.sides import BASE, TWO_WORKERS, Side
from large_batch.tasks import BASE_BATCH, FACTORS, Task

TARGET_SHARE = 0.25
FACTOR = 3.0
"""Agreement of a measured critical batch with the noise scale; the paper claims its order."""
COMPARED = ("plain", "linear", "warm-up", "LARS")


@dataclass(frozen=True)
class Efficiency:
    """At one factor; None: there are no runs, or the loss was not reached."""

    factor: int
    predicted: float | None
    measured: float | None
    recipe: str = ""

    @property
    def critical_batch(self) -> float | None:
        """The B with which the formula gives the measured efficiency; None if it does not lose."""
        if self.measured is None or not 1 / self.factor < self.measured < 1:
            return None
        return BASE_BATCH * (self.factor * self.measured - 1) / (1 - self.measured)


def noise_scale(task: Task, runs: Mapping[Key, LargeRun]) -> list[float]:
    """By point of the run; empty if it was not measured."""
    own = [runs.get((task.name, TWO_WORKERS.name, seed)) for seed in task.seeds]
    return next((run.noise for run in own if run is not None), [])


def predicted_batch(task: Task, runs: Mapping[Key, LargeRun]) -> float | None:
    """The noise scale in samples, the median before the rate falls."""
    last = int(NUM_POINTS * task.milestones[0] / task.epochs)
    noise = noise_scale(task, runs)[:last]
    return statistics.median(noise) if noise else None


def efficiencies(task: Task, runs: Mapping[Key, LargeRun]) -> list[Efficiency]:
    """At each factor, predicted and measured."""
    critical = predicted_batch(task, runs)
    base = _curve(task, BASE, runs)
    found = []
    for factor in FACTORS:
        predicted = None
        if critical:
            predicted = (1 + BASE_BATCH / critical) / (1 + factor * BASE_BATCH / critical)
        target = base[int(TARGET_SHARE * len(base))] if base else 0.0
        needed = {
            recipe: points
            for recipe in COMPARED
            if (
                points := _points_to(target, _curve(task, Side(factor=factor, recipe=recipe), runs))
            )
        }
        best = min(needed, key=lambda recipe: needed[recipe], default="")
        own = _points_to(target, base)
        measured = own / needed[best] if best and own else None
        found.append(Efficiency(factor, predicted, measured, best))
    return found


def _curve(task: Task, side: Side, runs: Mapping[Key, LargeRun]) -> list[float]:
    """The mean training loss of all seeds, of whole curves; smoothed over three points."""
    own = [run.curve for key, run in runs.items() if key[:2] == (task.name, side.name)]
    whole = [curve for curve in own if len(curve) == NUM_POINTS]
    if not whole or len(whole) < len(own):  # one that diverged has no end
        return []
    mean = [statistics.mean(column) for column in zip(*whole, strict=True)]
    return [statistics.mean(mean[max(0, i - 1) : i + 2]) for i in range(len(mean))]


def _points_to(target: float, curve: Sequence[float]) -> float | None:
    """Where the curve first reaches the target, between two points; None: it does not."""
    for index, value in enumerate(curve):
        if value <= target:
            if index == 0:
                return 0.5
            before = curve[index - 1]
            return index - 0.5 + (before - target) / (before - value)
    return None
