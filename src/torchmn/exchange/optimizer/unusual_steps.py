"""Unusual steps: with a closure, inside `join`, or with samples that were not counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import UsageError
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replicas import copy_state_from_rank, named_tensors, parameters_of
from torchmn.exchange.schedules.every_step import share_with_late_ranks

if TYPE_CHECKING:
    from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer

_MAX_STEPS = 10
"""Consecutive steps without a count before the error; a few are legal, as a script may step more
than once with a gradient."""


class UncountedSteps:
    """Detects steps whose samples were not counted, under a schedule that needs their number.

    Blocks of local updates would never end with them. Local.
    """

    def __init__(self, schedule: str, inner: Optimizer, reducer: GradientReducer) -> None:
        self._schedule, self._inner, self._reducer = schedule, inner, reducer
        self._num_steps = 0
        """Number of consecutive steps without a count."""

    def before_step(self) -> None:
        """Raise UsageError if no samples were counted, and no loader knows their number."""
        reducer = self._reducer
        own = reducer.contribution
        is_own_step = reducer.is_suspended  # otherwise an exchange has taken the count already
        if is_own_step:
            own.begin_exchange(reducer.step, has_backward=True)
        if own.is_known or (own.was_ever_known and not is_own_step):
            self._num_steps = 0
            return
        if all(p.grad is None for p in parameters_of(self._inner)):
            return
        self._num_steps += 1
        if own.was_ever_known and self._num_steps < _MAX_STEPS:
            return
        since = f" in {_MAX_STEPS} steps" if own.was_ever_known else ""
        raise UsageError(
            f"{reducer.comm.rank_label}: {self._schedule} counts samples, but the model's forward "
            f"has seen no tensor with a batch dimension{since}. Calls of the whole model in "
            "train() are counted; otherwise call optimizer.set_weight(number_of_samples) before "
            "step()."
        )


def over_ranks(
    closure: Callable[[], float], reducer: GradientReducer, before_step: Callable[[], None]
) -> Callable[[], float]:
    """Return a closure whose gradients, and loss, are means (or sums) over ranks. Local.

    Calling the returned closure is *collective*. A rank that makes no backward pass in it takes
    part in the exchange. ``before_step`` is called when the gradients are complete.
    """
    given = reducer.contribution.given

    def mean_of_closure() -> float:
        reducer.restart_counts()
        if given is not None:  # for every pass of this step
            reducer.contribution.set(*given)
        with torch.enable_grad():
            loss = closure()
        is_shared = reducer.is_needed
        if is_shared and reducer.num_passes == 0:  # no backward pass on this rank
            reducer.exchange_now(is_late=True)
        if is_shared and reducer.exchange.num_sets == 1:  # p.grad holds the means of this pass
            share_with_late_ranks(reducer)
        before_step()
        return _loss_over_ranks(loss, reducer) if is_shared else loss

    return mean_of_closure


def _loss_over_ranks(loss: float, reducer: GradientReducer) -> float:
    """The mean or sum of the ranks' losses, combined like their gradients. *Collective.*"""
    weight = reducer.passes_weight
    value = loss.detach() if isinstance(loss, Tensor) else loss
    part = float(value) * weight if weight else 0.0  # the loss of nothing may be NaN
    row = torch.tensor([part, weight], dtype=torch.float64, device="cpu")
    total, total_weight = reducer.comm.allreduce(row).tolist()
    mean = float(total if reducer.exchange.reduction == "sum" else total / (total_weight or 1))
    if isinstance(value, Tensor):  # as `loss.item()` is what users write
        return cast(float, torch.full_like(value, mean))
    return mean


@contextmanager
def joined(optimizer: MultiNodeOptimizer, models: Sequence[nn.Module]) -> Iterator[None]:
    """See `MultiNodeOptimizer.join`. *Collective.*"""
    reducer = optimizer.reducer
    reducer.restart_counts()
    yield
    with reducer.without_data():
        while True:
            optimizer.schedule.step(None)
            if not reducer.exchange.num_active:
                break
            optimizer.recorded.step_without_data(optimizer)
    schedule = optimizer.schedule
    reducer.contribution.reset()
    reducer.exchange.forget_scale()
    comm = reducer.comm
    gathered = comm.allgather_obj((reducer.num_passes, reducer.step))
    last = max(num for num, _ in gathered)
    if schedule.traits.replica_consistency == "per_step":
        schedule.flush()
        if any(num < last for num, _ in gathered):
            source = next(rank for rank, (num, _) in enumerate(gathered) if num == last)
            tensors = list(named_tensors(models).values())
            copy_state_from_rank(comm, tensors, optimizer.inner, source)
            reducer.exchange.num_in_step = 0
    reducer.step = max(step for _, step in gathered)
