"""Every step: p.grad <- mean over ranks of p.grad, overlapped with backward.

Synchronous SGD. Differs from ChainerMN in that the mean is complete when ``backward()`` returns,
not inside ``update()``: the user's clipping and unscaling see it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from torchmn.exchange.ranks_without_backward import share_with_late_ranks
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.schedules.base import Schedule


class EveryStep(Schedule):
    """Gradients are averaged at each backward pass.

    Args:
        exact: send gradients as they are, also where the optimizer has a codec: for a phase of
            `Phases` in which a codec or the steps of single ranks would cost accuracy.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=EveryStep())
    """

    name = "every_step"

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self.num_active = 0
        """How many ranks had data in the last exchange."""
        self.num_samples = 0.0
        """Samples of all ranks in the last exchange, where they are counted."""
        self._is_exchanged = False

    def attach(self, reducer: GradientReducer, inner: Optimizer) -> None:
        """See `Schedule.attach`."""
        super().attach(reducer, inner)
        if self.exact and reducer.codec is not None:
            reducer.reconfigure(reducer.comm, None)

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        reducer = self._reducer
        if self._is_exchanged:
            reducer.warn_of_second_pass()
        if reducer.comm.engine.is_idle:
            reducer.reduce_remaining()
        else:
            reducer.start_remaining()
        means = reducer.buffers.swap()
        reducer.means.assign(means)
        self.num_active, self.num_samples = means.num_active, means.num_samples
        self._is_exchanged = True

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`. A rank without any backward pass takes part here."""
        if closure is None:
            self.exchange_if_late()
            share_with_late_ranks(self._reducer)
        self._is_exchanged = False
        result = self._inner.step(closure)
        self._is_exchanged = False
        return result

    def exchange_if_late(self) -> None:
        """See `Schedule.exchange_if_late`."""
        if not self._is_exchanged or self._reducer.has_unexchanged:
            self._reducer.exchange_now(is_late=True)

    def shadow_step(self) -> int:
        """See `Schedule.shadow_step`."""
        means = self._reducer.shadow_exchange()
        share_with_late_ranks(self._reducer)
        self.num_active, self.num_samples = means.num_active, means.num_samples
        return means.num_active

    def on_zero_grad(self) -> None:
        """See `Schedule.on_zero_grad`."""
        self._is_exchanged = False
