"""Steps that are not the usual one: with a closure, in `join`, late under a scaler, uncounted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from torchmn.base.errors import UsageError
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replicas import copy_state_from_rank, named_tensors, parameters_of
from torchmn.exchange.schedules.every_step import share_with_late_ranks

if TYPE_CHECKING:
    from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer

_MAX_STEPS = 10
"""In a row: a script may step more than once with a gradient."""


class UncountedSteps:
    """Steps whose samples no forward pass has counted, under a schedule that needs their number.

    Blocks of local updates would never end. Local.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        """In a row."""

    def before_step(self, optimizer: MultiNodeOptimizer) -> None:
        """Raise UsageError if nothing was counted, and no loader knows the samples."""
        comm, reducer = optimizer.communicator, optimizer.reducer
        own = reducer.contribution
        if not optimizer.schedule.traits.counts_samples:
            return
        is_own_step = reducer.is_suspended  # else exchanges have taken what was counted
        if is_own_step:
            own.begin_exchange(reducer.step, has_backward=True)
        if own.is_known or (own.was_ever_known and not is_own_step):
            self._num_steps = 0
            return
        if all(p.grad is None for p in parameters_of(optimizer.inner)):
            return
        self._num_steps += 1
        if own.was_ever_known and self._num_steps < _MAX_STEPS:
            return
        since = f" in {_MAX_STEPS} steps" if own.was_ever_known else ""
        raise UsageError(
            f"{comm.rank_label}: {optimizer.schedule.name} counts samples, but the model's forward "
            f"has seen no tensor with a batch dimension{since}. Calls of the whole model in "
            "train() are counted; otherwise call optimizer.set_weight(number_of_samples) before "
            "step()."
        )


class LateScalerSteps:
    """Steps of a GradScaler on a rank that had no backward pass: it takes part before it looks.

    Then the scaler finds the same values that are not finite as those of other ranks, and leaves
    out the same steps. `share_with_late_ranks` is what a late rank does without a scaler.

    ``GradScaler.step`` asks an optimizer whether it unscales by itself. A late rank takes part then
    and says yes: the scaler looks for values that are not finite, leaves the scale and what it has
    found with the optimizer, and calls `step` in any case.
    """

    def __init__(self) -> None:
        self._num_passes = -1
        """How many exchanges there had been at the last one."""

    def take_part(self, optimizer: MultiNodeOptimizer) -> bool:
        """Take part in the exchange if this rank has not; whether it was late. *Collective.*"""
        reducer = optimizer.reducer
        if reducer.num_passes == self._num_passes:  # of a step that it left out
            reducer.exchange.num_in_step = 0
        before = reducer.num_passes
        reducer.exchange_if_late()
        self._num_passes = reducer.num_passes
        return self._num_passes > before

    def unscale(self, optimizer: MultiNodeOptimizer) -> bool:
        """Unscale the gradients of a late rank whose scaler calls its step; False: leave it out.

        Raises UsageError: the script has called ``unscale_``, which found no gradients and noted
        nothing, so that the scaler could not follow the others.
        """
        scale, found_inf = vars(optimizer)["grad_scale"], vars(optimizer)["found_inf"]
        if not isinstance(scale, Tensor):
            raise UsageError(
                f"{optimizer.communicator.rank_label}: scaler.unscale_(optimizer) was called on a "
                "rank that had no backward pass in this step, and so no gradients yet: they come "
                "from the other ranks in scaler.step(optimizer). On such a rank leave unscale_() "
                "and clipping out: it takes over the gradients as the others have clipped them."
            )
        if float(found_inf):
            return False
        factor = scale.double().reciprocal().float()
        for parameter in parameters_of(optimizer.inner):
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
        return True


def over_ranks(
    closure: Callable[[], float], reducer: GradientReducer, before_step: Callable[[], None]
) -> Callable[[], float]:
    """The closure with gradients that are means, and its loss put together as they are.

    What it returns is *collective*. A rank without a backward pass in it takes part in the
    exchange. ``before_step`` is called when the gradients are there.
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
        if is_shared and reducer.exchange.num_sets == 1:  # the means are those of this exchange
            share_with_late_ranks(reducer)
        before_step()
        return _loss_over_ranks(loss, reducer) if is_shared else loss

    return mean_of_closure


def _loss_over_ranks(loss: float, reducer: GradientReducer) -> float:
    """The ranks' losses, put together as their gradients were. *Collective.*"""
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
            optimizer.recorded.step_without_data()
            if optimizer.tuner is not None:
                optimizer.tuner.step_ended()
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
