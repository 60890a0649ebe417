"""The schedule: when ranks exchange gradients or parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from torchmn.exchange.reducer import GradientReducer

ReplicaConsistency = Literal["per_step", "per_block", "none"]
"""How long ranks' parameters may differ, at most: when they hold the same bits again."""


class Schedule(ABC):
    """When ranks exchange gradients or parameters.

    A schedule defines `name`, `backward_ended`, `step` and `shadow_step`; `EveryStep` is the
    simplest. Everything below these has a default, for schedules that need it. All methods are
    *collective* unless they are called local: every rank calls them in the same order.

    >>> from torchmn.exchange.schedules import EveryStep, Schedule
    >>> isinstance(EveryStep(), Schedule), EveryStep().name
    (True, 'every_step')
    """

    name: str
    _reducer: GradientReducer
    _inner: Optimizer

    @abstractmethod
    def backward_ended(self) -> None:
        """All gradients of this backward pass are packed: exchange them, set ``p.grad``."""

    @abstractmethod
    def step(self, closure: Callable[[], float] | None) -> float | None:
        """In place of the local optimizer's step."""

    @abstractmethod
    def shadow_step(self) -> int:
        """Take part in a step of the others without data; returns how many ranks had data."""

    # ---- what a schedule may change ----

    num_sets = 1
    """Sets of buckets that must exist side by side; 0 where gradients stay the rank's own."""
    exchanges_shards = True
    """Whether it takes parameters that are DTensors, of which each rank holds a part."""
    is_server = False
    """Whether this rank only serves the others and trains nothing."""

    @property
    def averages_gradients(self) -> bool:
        """Whether it takes means of the ranks' gradients of a step, in a phase at least."""
        return self.num_sets > 0

    @property
    def has_own_steps(self) -> bool:
        """Whether each rank steps with its own gradients, in a phase at least."""
        return self.num_sets == 0

    @property
    def staleness_steps(self) -> int:
        """How many steps late a gradient is applied: 0 where ``p.grad`` is of this backward."""
        return 0

    @property
    def is_within_block(self) -> bool:
        """Whether ranks have trained alone since they last had the same parameters. Local."""
        return False

    @property
    def counts_samples(self) -> bool:
        """Whether it needs the samples that the model's forward has seen."""
        return False

    @property
    def replica_consistency(self) -> ReplicaConsistency:
        """What it promises about the parameters of the ranks, from now on."""
        return "per_step"

    def attach(self, reducer: GradientReducer, inner: Optimizer) -> None:
        """Called once, when the multi-node optimizer is made."""
        self._reducer, self._inner = reducer, inner

    def watch(self, models: Sequence[nn.Module]) -> None:  # noqa: B027 - a default
        """Called once, after `attach`: the models whose passes it may have to see. Local."""

    def remove_eager_step(self) -> None:  # noqa: B027 - a default
        """Parameters are about to be read: make them those that all ranks hold. Local."""

    def on_zero_grad(self) -> None:  # noqa: B027 - a default
        """Gradients were cleared: the next backward pass is the first of its step. Local."""

    def exchange_if_late(self) -> None:  # noqa: B027 - a default
        """Before `step` uses gradients: take part, if no backward pass of this rank has done it."""

    def before_load(self) -> None:  # noqa: B027 - a default
        """A model is about to load a state. Local."""

    def flush(self) -> None:  # noqa: B027 - a default
        """Apply what was exchanged but not applied, and exchange what was not exchanged."""

    def rebuild(self) -> None:  # noqa: B027 - a default
        """The optimizer has other parameters than before, and replicas are equal."""

    def close(self) -> None:  # noqa: B027 - a default
        """Close what it has opened, such as connections and threads. Local."""

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step: tensors and numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; an empty dict starts from scratch."""
        self.on_zero_grad()
