"""The seam of the schedules: what ranks agree on, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer

from torchmn.exchange.gradients import GradientExchange


class Schedule(Protocol):
    """When ranks come to agree. Its methods are collective: every rank calls them alike."""

    name: str
    num_sets: int
    """Sets of buckets that must exist side by side."""
    staleness_steps: int
    """How many steps late a gradient is applied: 0 where ``p.grad`` is of this backward pass."""

    def attach(self, exchange: GradientExchange, inner: Optimizer) -> None:
        """Called once, at wrap time."""

    def backward_ended(self) -> None:
        """All gradients of this backward pass are packed: exchange them, set ``p.grad``."""

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """In place of the local optimizer's step."""

    def take_part(self) -> int:
        """Join the others' exchange without data; returns how many ranks had data."""

    def forget_backward(self) -> None:
        """Gradients were cleared: the next backward pass is the first of its step. Local."""

    def flush(self) -> None:
        """Apply what was exchanged but not applied."""

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step: tensors and numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; an empty dict starts anew."""
