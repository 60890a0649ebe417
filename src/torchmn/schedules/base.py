"""The seam of the schedules: what ranks agree on, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from torchmn.gradients.reducer import GradientReducer

LOOKED_AT_BY_SCALER = "a GradScaler looks at all gradients"
"""What `DefersUpdates.await_gradients` is told by one."""
ReplicaConsistency = Literal["per_step", "per_block", "none"]
"""How long ranks' parameters may differ, at most: when they hold the same bits again."""


class Schedule(Protocol):
    """When ranks come to agree. Its methods are collective: every rank calls them alike."""

    name: str
    num_sets: int
    """Sets of buckets that must exist side by side; 0 where gradients stay the rank's own."""

    @property
    def staleness_steps(self) -> int:
        """How many steps late a gradient is applied: 0 where ``p.grad`` is of this backward."""

    @property
    def counts_samples(self) -> bool:
        """Whether it asks what `GradientReducer.num_samples` counts."""

    @property
    def replica_consistency(self) -> ReplicaConsistency:
        """What it promises about the parameters of the ranks, from now on."""

    def attach(self, reducer: GradientReducer, inner: Optimizer) -> None:
        """Called once, at wrap time."""

    def backward_ended(self) -> None:
        """All gradients of this backward pass are packed: exchange them, set ``p.grad``."""

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """In place of the local optimizer's step."""

    def shadow_step(self) -> int:
        """Join the others' exchange without data; returns how many ranks had data."""

    def on_zero_grad(self) -> None:
        """Gradients were cleared: the next backward pass is the first of its step. Local."""

    def flush(self) -> None:
        """Apply what was exchanged but not applied, and agree on what was not exchanged."""

    def rebuild(self) -> None:
        """The optimizer has other parameters than before, and replicas are equal: lay out anew."""

    def close(self) -> None:
        """End what it has opened: connections, threads. Local."""

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step: tensors and numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; an empty dict starts anew."""


@runtime_checkable
class DefersUpdates(Protocol):
    """A schedule whose means come after backward() has returned, and whose updates after step().

    That it has these methods declares it. All are local, and wait for what is under way.
    """

    def install_hooks(self, models: Sequence[nn.Module], sync_reason: str | None) -> None:
        """Called once, behind `Schedule.attach`: the models, and why nothing may be deferred."""

    def await_gradients(self, why: str | None = None) -> None:
        """Between backward() and step(): make every ``p.grad`` the mean.

        ``why`` says who needs it, if nobody asked for it in so many words.
        """

    def complete(self) -> None:
        """Apply every update of past steps."""
