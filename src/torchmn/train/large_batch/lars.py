"""LARS: SGD whose rate is adapted to each layer, for large batches.

You, Gitman and Ginsburg, *Large Batch Training of Convolutional Networks*, 2017, arXiv 1708.03888,
section 4, equation 6 and algorithm 1, for the weights w of a layer and their gradient g:

    local rate   l = trust * |w| / (|g| + weight_decay * |w|)
                 v <- momentum * v + rate * l * (g + weight_decay * w)
                 w <- w - v

Differences: where w or the denominator is 0, l is 1, or such a layer would never move; biases and
the parameters of normalization, which have one dimension or none, have l = 1 and no weight decay,
as in the authors' later work (arXiv 1904.00962, section 4). As in the paper, the rate is a factor
inside v: after it has changed, v still holds the updates of the old rate.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.train.large_batch.trust_ratio import (
    TrustRatioOptimizer,
    norms,
    raise_if_negative,
    ratios,
)


class LARS(TrustRatioOptimizer):
    """SGD with momentum and layer-wise adaptive rates (You et al. 2017, arXiv 1708.03888). Local.

    Args:
        params: parameters, or groups of them.
        lr: the global rate; for large batches well above that of SGD, with a warm-up.
        momentum: the momentum factor; m in the paper.
        weight_decay: the coefficient of weight decay; beta in the paper.
        trust: how far a layer moves relative to the norm of its weights; eta in the paper.
        exclude_vectors: leave out the local rate and weight decay for parameters of at most one
            dimension: biases and normalization. Parameter groups may differ in it.

    Raises UsageError: an argument, or an option of a group, is out of range.

    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = LARS(layer.parameters(), lr=1.0, weight_decay=1e-4)
    """

    averages = ("velocity",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        *,
        exclude_vectors: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "exclude_vectors": exclude_vectors,
        }
        super().__init__(params, defaults)

    @staticmethod
    def _raise_if_out_of_range(options: dict[str, Any]) -> None:
        """Raise UsageError: an option of a group is out of range."""
        if not 0 <= options["momentum"] < 1:
            raise UsageError(f"momentum={options['momentum']} must be 0 or more and less than 1.")
        raise_if_negative(options, ("lr", "weight_decay", "trust"))

    def _update(
        self, group: dict[str, Any], params: list[Any], weight_decay: float, *, is_adapted: bool
    ) -> None:
        grads = [p.grad for p in params]
        velocities = [self._state_of(p)["velocity"] for p in params]
        updates = list(torch._foreach_add(grads, params, alpha=weight_decay))
        if is_adapted:
            own = norms(params)
            quotients = ratios(own, norms(grads) + weight_decay * own, group["trust"])
            torch._foreach_mul_(updates, quotients)
        torch._foreach_mul_(updates, float(group["lr"]))
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, updates)
        torch._foreach_sub_(params, velocities)
