"""The settings of the large-batch table that were chosen, on images and seeds it does not use.

Chosen are the rate of the base batch, the length of the warm-up and the trust coefficient of LARS.
A run of the choice has the last training images, which are not trained on, as test images (MNIST
10,000 of 60,000, CIFAR 2,000 of 10,000), and seeds of its own. Plain and linear scaling have
nothing to choose. Fixed before the first run of the record:

- the rate: at the base batch, with the first seed, as these runs are long; LARS and all large
  batches scale this rate and have none of their own;
- the warm-up: at 16 times the base batch with SGD; all batches and LARS have the same one;
- the trust coefficient: at 16 and 64 times the base batch, with that rate and warm-up; 4 times has
  that of 16;
- the rule: the highest mean accuracy over the seeds; the first candidate in a tie.

The base batch of 8 was chosen before that, also on held-out images: with 16, 16 times the base had
256 steps on CIFAR and lost 5 points after a warm-up, for want of updates.

`bench_recipes.py --choose` carries the runs out and keeps them in
`records/large_batch_choice.jsonl`. Each stage takes the values of the stages before it from
`tasks.py`, so that they are carried out and entered there one after another.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from accuracy.runs import Key
from record import Bar

from large_batch.runs import LargeRun
from large_batch.sides import Side
from large_batch.tasks import TASKS, Task

SEEDS = (100, 101)
HELD_OUT = {"mnist": 10_000, "cifar": 2_000}
RATES = {"mnist": (0.0025, 0.005, 0.01), "cifar": (0.005, 0.01, 0.02)}
WARM_UP_SHARES = (0.05, 0.1, 0.2)
TRUSTS = (0.02, 0.05, 0.1, 0.2)
STAGES = ("rate", "warm-up", "trust")


def _task(task: Task) -> Task:
    held_out = HELD_OUT[task.name]
    return replace(
        task,
        name=f"{task.name}, held out",
        held_out=held_out,
        num_images=min(task.num_images, 10_000 - held_out if task.name == "cifar" else 60_000),
        seeds=SEEDS,
        num_seeds=len(SEEDS),
    )


CHOICE_TASKS = {name: _task(task) for name, task in TASKS.items()}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of a task, its candidates as sides by value, and the value in `tasks.py`."""

    stage: str
    task: Task
    candidates: Mapping[float, Side]
    used: float

    @property
    def name(self) -> str:
        """What is chosen."""
        factor = next(iter(self.candidates.values())).factor
        return f"{self.task.name}: {self.stage}" + (f" at {factor} x" if factor > 1 else "")


def choices() -> Iterator[Choice]:
    """All choices, in the order in which they are to be carried out."""
    for name, task in CHOICE_TASKS.items():
        sides = {
            rate: Side(factor=1, recipe="base", candidate=f"rate {rate:g}", learning_rate=rate)
            for rate in RATES[name]
        }
        first = replace(task, seeds=SEEDS[:1])
        yield Choice(stage="rate", task=first, candidates=sides, used=task.learning_rate)
        sides = {
            (epochs := share * task.epochs): Side(
                factor=16,
                recipe="warm-up",
                candidate=f"{epochs:g} epochs",
                warm_up_epochs=epochs,
            )
            for share in WARM_UP_SHARES
        }
        yield Choice(stage="warm-up", task=task, candidates=sides, used=task.warm_up_epochs)
        for factor in (16, 64):
            sides = {
                trust: Side(factor=factor, recipe="LARS", candidate=f"trust {trust}", trust=trust)
                for trust in TRUSTS
            }
            yield Choice(stage="trust", task=task, candidates=sides, used=task.trust[factor])


def means_of(choice: Choice, runs: Mapping[Key, LargeRun]) -> dict[float, float]:
    """By candidate the mean accuracy over the seeds; NaN: runs are missing."""
    means = {}
    for value, side in choice.candidates.items():
        own = [runs.get((choice.task.name, side.name, seed)) for seed in choice.task.seeds]
        found = [run.accuracy for run in own if run is not None]
        means[value] = statistics.mean(found) if len(found) == len(own) else math.nan
    return means


def chosen(choice: Choice, runs: Mapping[Key, LargeRun]) -> float | None:
    """The best candidate; None as long as runs are missing."""
    means = means_of(choice, runs)
    if any(math.isnan(mean) for mean in means.values()):
        return None
    return max(means, key=lambda value: means[value])


def choice_bars(runs: Mapping[Key, LargeRun]) -> list[Bar]:
    """What each candidate reached, and whether `tasks.py` has the chosen one."""
    bars = []
    for choice in choices():
        best = chosen(choice, runs)
        for value, mean in means_of(choice, runs).items():
            mark = ": chosen" if value == best else ""
            bars.append(Bar(f"{choice.name} {value:g}{mark}", mean, "%"))
        if best is None:
            name = f"{choice.name} in the table: missing (not all candidates were run)"
            bars.append(Bar(name, math.nan, "", "chosen", None))
        else:
            held = math.isclose(choice.used, best)
            bars.append(Bar(f"{choice.name} in the table", choice.used, "", f"= {best:g}", held))
    return bars
