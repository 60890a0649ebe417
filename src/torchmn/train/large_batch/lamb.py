"""LAMB: Adam whose rate is adapted to each layer, for large batches.

You et al., *Large Batch Optimization for Deep Learning: Training BERT in 76 minutes*, 2019,
arXiv 1904.00962, section 3.2 and algorithm 2, for the weights w of a layer and their gradient g at
step t:

    m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
    r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    w <- w - rate * |w| / |r + weight_decay w| * (r + weight_decay w)

The paper's phi is the identity here, as in its experiments. Differences: where either norm is 0,
the ratio is 1; biases and the parameters of normalization, which have one dimension or none, have a
ratio of 1 and no weight decay, as in section 4 of the paper.
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


class LAMB(TrustRatioOptimizer):
    """Adam with layer-wise adaptive rates (You et al. 2019, arXiv 1904.00962). Local.

    Args:
        params: parameters, or groups of them.
        lr: the global rate; scale it with the square root of the batch (`SquareRootScaling`).
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the square root in the denominator.
        weight_decay: the coefficient of weight decay, which does not enter m and v.
        exclude_vectors: leave out the ratio and weight decay for parameters of at most one
            dimension: biases and normalization. Parameter groups may differ in it.

    Raises UsageError: an argument, or an option of a group, is out of range.

    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = LAMB(layer.parameters(), lr=0.01, weight_decay=0.01)
    """

    averages = ("mean", "square")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        exclude_vectors: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "exclude_vectors": exclude_vectors,
        }
        super().__init__(params, defaults)

    @staticmethod
    def _raise_if_out_of_range(options: dict[str, Any]) -> None:
        """Raise UsageError: an option of a group is out of range."""
        betas = options["betas"]
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"betas={betas} must be 0 or more and less than 1.")
        raise_if_negative(options, ("lr", "eps", "weight_decay"))

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter, whose steps are counted."""
        state = super()._state_of(parameter)
        state["step"] = state.get("step", 0) + 1
        return state

    def _update(
        self, group: dict[str, Any], params: list[Any], weight_decay: float, *, is_adapted: bool
    ) -> None:
        grads, states = [p.grad for p in params], [self._state_of(p) for p in params]
        rate, (beta1, beta2) = float(group["lr"]), group["betas"]
        means, squares = [state["mean"] for state in states], [state["square"] for state in states]
        corrections = [_corrections(group["betas"], state["step"]) for state in states]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = list(torch._foreach_sqrt(squares))
        torch._foreach_mul_(roots, [second / first for first, second in corrections])
        torch._foreach_add_(roots, [group["eps"] / first for first, _ in corrections])
        directions = list(torch._foreach_div(means, roots))
        if weight_decay:
            torch._foreach_add_(directions, params, alpha=weight_decay)
        if is_adapted:
            torch._foreach_mul_(directions, ratios(norms(params), norms(directions)))
        torch._foreach_add_(params, directions, alpha=-rate)


def _corrections(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """Bias corrections: the factors of m and of the square root of v."""
    return 1 / (1 - betas[0] ** step), 1 / (1 - betas[1] ** step) ** 0.5
