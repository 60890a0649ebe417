"""The sides: the base batch, and at 4, 16 and 64 times of it seven ways of training.

A large batch is that of ``factor`` simulated workers with the base batch each: batch normalization
sees the samples of one worker, the gradient is the mean over all of them (`training.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from large_batch.tasks import FACTORS

Recipe = Literal[
    "base", "plain", "linear", "warm-up", "LARS", "growth", "ghosts of 32", "one batch norm"
]
GHOST = 32
"""Samples of a ghost batch that is larger than the base batch, as in the paper."""
RECIPES: dict[Recipe, str] = {
    "plain": "the rate of the base batch",
    "linear": "the rate times the factor",
    "warm-up": "linear, reached by a gradual warm-up",
    "LARS": "warm-up, and LARS in place of SGD",
    "growth": "begins with the base batch and its rate; grows to the large one where a rate falls",
    "ghosts of 32": f"warm-up, and batch normalization over {GHOST} samples",
    "one batch norm": "warm-up, and batch normalization over all samples of a step",
}


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way of training with ``factor`` times the base batch.

    ``learning_rate``, ``warm_up_epochs`` and ``trust`` replace those of the task: candidates of
    `choice.py`, which have a name of their own.
    """

    factor: int
    recipe: Recipe
    candidate: str = ""
    learning_rate: float | None = None
    warm_up_epochs: float | None = None
    trust: float | None = None

    @property
    def name(self) -> str:
        """What the runs are recorded by."""
        text = self.recipe if self.factor == 1 else f"{self.factor} x, {self.recipe}"
        return f"{text}{', ' if self.candidate else ''}{self.candidate}"

    @property
    def is_scaled(self) -> bool:
        """Whether the rate is multiplied by the factor."""
        return self.recipe in ("linear", "warm-up", "LARS", "ghosts of 32", "one batch norm")

    @property
    def has_warm_up(self) -> bool:
        """Whether that rate is reached by a gradual warm-up."""
        return self.is_scaled and self.recipe != "linear"


BASE = Side(factor=1, recipe="base")
TWO_WORKERS = Side(factor=2, recipe="linear")
"""Two real workers, whose gradients give the gradient noise scale."""
SIDES = {
    side.name: side
    for side in (
        BASE,
        TWO_WORKERS,
        *(
            Side(factor=factor, recipe=recipe)
            for factor in FACTORS
            for recipe in RECIPES
            # 4 workers' samples together are hardly more than those of one.
            if factor > 4 or recipe not in ("ghosts of 32", "one batch norm")
        ),
    )
}
