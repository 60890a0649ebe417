"""Closures that `MultiNodeOptimizer.step` is given: their loss, over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from torchmn.exchange.ranks_without_backward import share_with_late_ranks
from torchmn.exchange.reducer import GradientReducer


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
        if is_shared and reducer.buffers.num_sets == 1:  # the means are those of this exchange
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
    mean = float(total if reducer.buffers.reduction == "sum" else total / total_weight)
    if isinstance(value, Tensor):  # as `loss.item()` is what users write
        return cast(float, torch.full_like(value, mean))
    return mean
