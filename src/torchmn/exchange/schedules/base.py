"""The base class of schedules, which decide when ranks exchange gradients or parameters."""

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
"""When all ranks hold bit-identical parameters: after each step, each block, or never."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The properties of a schedule that other parts of torchmn depend on.

    >>> from torchmn.exchange.schedules import DoubleBuffering
    >>> DoubleBuffering().traits.staleness_steps
    1
    """

    name: str
    num_sets: int = 1
    """Number of bucket sets that it uses in turns; 0 if gradients are not exchanged."""
    serves: bool = False
    """Whether this rank only serves the others and does not train."""
    averages_gradients: bool = True
    """Whether it uses means of the ranks' gradients of a step, at least at first."""
    has_own_steps: bool = False
    """Whether each rank steps with its own gradients, at least later on."""
    staleness_steps: int = 0
    """Number of steps by which a gradient is applied late; 0 if ``p.grad`` is that of the last
    backward pass."""
    counts_samples: bool = False
    """Whether it needs the number of samples that the model's forward has seen."""
    replica_consistency: ReplicaConsistency = "per_step"
    """When all ranks hold the same parameters, from now on."""
    is_within_block: bool = False
    """Whether ranks have trained alone since they last held the same parameters."""


class Schedule(ABC):
    """Decides when ranks exchange gradients or parameters.

    A schedule defines `traits`, `backward_ended` and `step`; `EveryStep` is the simplest. All other
    methods have a default. Methods are *collective*, that is, every rank calls them in the same
    order, unless their description says local. Its public attributes of plain types are its
    arguments: an optimizer is refused if they differ between ranks.

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
        """The current properties. A schedule whose traits never change has a class attribute."""

    @property
    def name(self) -> str:
        """The name of the schedule, which is saved with its state."""
        return self.traits.name

    def attach(
        self, reducer: GradientReducer, inner: Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """Connect to an optimizer; called once, when the multi-node optimizer is created.

        ``inner`` is the optimizer that was wrapped, and ``models`` own its parameters.
        """
        self._reducer, self._exchange, self._inner = reducer, reducer.exchange, inner
        self._comm, self._contribution = reducer.comm, reducer.contribution
        self._local_passes = reducer.local_passes

    @abstractmethod
    def backward_ended(self) -> None:
        """Exchange the gradients of a backward pass, and set ``p.grad``.

        Called by the reducer at the end of the pass, when all gradients are packed.
        """

    @abstractmethod
    def step(self, closure: Callable[[], float] | None) -> float | None:
        """Make a step; called in place of the inner optimizer's step, and returns the same.

        Inside `GradientReducer.without_data` this rank has left its loop: it must take part in a
        step of the others with weight 0, and leave the number of ranks that had data in the
        exchange's ``num_active``.
        """

    def _step_inner(self, closure: Callable[[], float] | None) -> float | None:
        """Call the inner optimizer's step, which need not take a closure. Local."""
        return self._inner.step() if closure is None else self._inner.step(closure)

    def flush(self) -> None:  # noqa: B027 - a default
        """Apply means that are still pending, and exchange changes that were not exchanged yet."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that outlives a step: tensors and numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - a default
        """Continue from `state_dict`; an empty dict starts from scratch."""

    # ---- optional: few schedules need these ----

    def before_access(self, access: Literal["read", "load"]) -> None:  # noqa: B027 - a default
        """Called before the script reads parameters, or loads a state into a model. Local."""

    def rebuild(self) -> None:  # noqa: B027 - a default
        """Called when the optimizer's parameters were replaced; all ranks hold the same ones."""

    def close(self) -> None:  # noqa: B027 - a default
        """Release resources such as connections and threads. Local."""
