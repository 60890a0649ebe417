"""The schedule: when ranks exchange gradients or parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from torchmn.comm import Communicator
from torchmn.exchange.gradient_exchange import GradientExchange
from torchmn.exchange.local_passes import LocalPasses
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.weights import Contribution

ReplicaConsistency = Literal["per_step", "per_block", "none"]
"""How long ranks' parameters may differ, at most: when they hold the same bits again."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What others must know of a schedule.

    >>> from torchmn.exchange.schedules import DoubleBuffering
    >>> DoubleBuffering().traits.staleness_steps
    1
    """

    name: str
    num_sets: int = 1
    """Sets of buckets that must exist side by side; 0 where gradients stay the rank's own."""
    takes_shards: bool = True
    """Whether it takes parameters that are DTensors, of which each rank holds a part."""
    serves: bool = False
    """Whether this rank only serves the others and trains nothing."""
    averages_gradients: bool = True
    """Whether it takes means of the ranks' gradients of a step, in a phase at least."""
    has_own_steps: bool = False
    """Whether each rank steps with its own gradients, in a phase at least."""
    staleness_steps: int = 0
    """How many steps late a gradient is applied: 0 where ``p.grad`` is of this backward."""
    counts_samples: bool = False
    """Whether it needs the samples that the model's forward has seen."""
    replica_consistency: ReplicaConsistency = "per_step"
    """What it promises about the parameters of the ranks, from now on."""
    is_within_block: bool = False
    """Whether ranks have trained alone since they last had the same parameters."""


class Schedule(ABC):
    """When ranks exchange gradients or parameters.

    A schedule defines `traits`, `backward_ended` and `step`; `EveryStep` is the simplest. All other
    methods have a default. They are *collective*, that is every rank calls them in the same order,
    unless they are called local.

    >>> from torchmn.exchange.schedules import EveryStep, Schedule
    >>> isinstance(EveryStep(), Schedule), EveryStep().name
    (True, 'every_step')
    """

    _reducer: GradientReducer
    _exchange: GradientExchange
    _contribution: Contribution
    _local_passes: LocalPasses
    _comm: Communicator
    _inner: Optimizer

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """As they are now. Where they never change this is an attribute of the class."""

    @property
    def name(self) -> str:
        """The name under which a state is saved."""
        return self.traits.name

    def attach(
        self, reducer: GradientReducer, inner: Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """Called once, when the multi-node optimizer is made. ``models`` own the parameters."""
        self._reducer, self._exchange, self._inner = reducer, reducer.exchange, inner
        self._comm, self._contribution = reducer.comm, reducer.contribution
        self._local_passes = reducer.local_passes

    @abstractmethod
    def backward_ended(self) -> None:
        """All gradients of this backward pass are packed: exchange them, set ``p.grad``."""

    @abstractmethod
    def step(self, closure: Callable[[], float] | None) -> float | None:
        """In place of the local optimizer's step.

        Inside of `GradientReducer.without_data` this rank has left its loop: take part in a step of
        the others with weight 0, so that the exchange's ``num_active`` says how many had data.
        """

    def flush(self) -> None:  # noqa: B027 - a default
        """Apply what was exchanged but not applied, and exchange what was not exchanged."""

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step: tensors and numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - a default
        """Continue from `state_dict`; an empty dict starts from scratch."""

    # ---- what few schedules need ----

    def before_access(self, access: Literal["read", "load"]) -> None:  # noqa: B027 - a default
        """The script is about to read parameters, or to load a state into a model. Local."""

    def rebuild(self) -> None:  # noqa: B027 - a default
        """The optimizer has other parameters than before, and replicas are equal."""

    def close(self) -> None:  # noqa: B027 - a default
        """Close what it has opened, such as connections and threads. Local."""
