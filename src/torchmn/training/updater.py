"""The seam between the trainer and what an iteration does."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer


class Updater(Protocol):
    """One iteration of training, again and again. Called by `Trainer` on every rank alike."""

    model: nn.Module
    """What reports as ``main/...`` and is saved."""
    optimizer: Optimizer
    iteration: int
    """Iterations done."""
    iterations_per_epoch: Fraction | None
    """The mean number of iterations in an epoch; None if it is not known."""

    @property
    def epoch(self) -> int:
        """Epochs done."""

    @property
    def epoch_detail(self) -> float:
        """Epochs done, with the fraction of the current one."""

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last iteration; None before the first."""

    def update(self) -> None:
        """Do one iteration."""

    def finalize(self) -> None:
        """Release what the updater holds; also after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Where the updater stands; model and optimizer are saved by the trainer."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
