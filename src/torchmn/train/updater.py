"""The interface between the trainer and an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer


class Updater(Protocol):
    """Does the iterations of training. Called by `Trainer` in the same way on every rank."""

    model: nn.Module
    """Its reports are ``main/...``; it is saved."""

    @property
    def optimizer(self) -> Optimizer | dict[str, Optimizer]:
        """The one that is saved, or several by name."""

    @property
    def iteration(self) -> int:
        """Iterations done."""

    @property
    def iterations_per_epoch(self) -> Fraction | None:
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
        """Release the updater's resources; also called after an error."""

    def state_dict(self) -> dict[str, Any]:
        """The progress of the updater; model and optimizer are saved by the trainer."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
