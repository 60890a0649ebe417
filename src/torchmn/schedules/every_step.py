"""Every step: p.grad <- mean over ranks of p.grad, hidden behind backward.

Synchronous SGD. Differs from ChainerMN in that the mean is complete when ``backward()`` returns,
not inside ``update()``: the user's clipping and unscaling see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from torchmn.gradients.reducer import GradientReducer
from torchmn.schedules.base import ReplicaConsistency


class EveryStep:
    """Gradients are averaged at each backward pass."""

    name = "every_step"
    num_sets = 1
    staleness_steps = 0
    replica_consistency: ReplicaConsistency = "per_step"
    counts_samples = False
    _reducer: GradientReducer
    _inner: Optimizer

    def __init__(self) -> None:
        self.num_active = 0
        """How many ranks had data in the last exchange."""
        self.num_samples = 0.0
        """Samples of all ranks in the last exchange, where they are counted."""
        self._is_exchanged = False

    def attach(self, reducer: GradientReducer, inner: Optimizer) -> None:
        """See `Schedule.attach`."""
        self._reducer, self._inner = reducer, inner

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        reducer = self._reducer
        if self._is_exchanged:
            reducer.warn_of_second_pass()
        if reducer.comm.engine.is_idle:
            reducer.reduce_remaining()
        else:
            reducer.start_remaining()
        means = reducer.turn()
        reducer.wait_and_expose(means)
        self.num_active, self.num_samples = means.num_active, means.num_samples
        self._is_exchanged = True

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`. A rank without any backward pass takes part here."""
        if closure is None and (not self._is_exchanged or self._reducer.has_unexchanged):
            self._reducer.exchange_now()
        self._is_exchanged = False
        result = self._inner.step(closure)
        self._is_exchanged = False
        return result

    def shadow_step(self) -> int:
        """See `Schedule.shadow_step`."""
        self._reducer.finish_filling()
        self._reducer.reduce_remaining()
        means = self._reducer.turn()
        means.wait()
        self._reducer.inspect(means)
        self._reducer.adopt_unit(means)
        self.num_active, self.num_samples = means.num_active, means.num_samples
        return means.num_active

    def on_zero_grad(self) -> None:
        """Gradients were cleared: the next backward pass is the first of its step."""
        self._is_exchanged = False

    def flush(self) -> None:
        """See `Schedule.flush`: nothing is ever pending."""

    def rebuild(self) -> None:
        """See `Schedule.rebuild`: all layout is the exchange's."""

    def close(self) -> None:
        """See `Schedule.close`: there is nothing to close."""

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`: nothing outlives a step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`."""
        self._is_exchanged = False
