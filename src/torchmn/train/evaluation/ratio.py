"""A reported value that is a mean over something other than samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchmn.errors import UsageError


class Ratio(tuple[Any, float]):
    """``sum / count``, reported so that its mean over batches and ranks is exact.

    Report it in place of a value: the mean over batches and ranks is then the sum of the sums
    divided by the sum of the counts, for example for accuracy per token. ``sum`` is a number or a
    tensor without dimensions, ``count`` a number of at least 0. A batch with count 0 is ignored.

    It is the pair (mean, weight) that pytorch-pfn-extras accepts as a weighted value, so that its
    own Evaluator and LogReport weight it too.

    Raises UsageError: a value is not a scalar, or the count is negative or not finite.

    >>> ratio = Ratio(3, 4)
    >>> ratio.sum, ratio.weight, ratio.mean
    (3.0, 4.0, 0.75)
    """

    sum: Any

    def __new__(cls, sum: float | Tensor, count: float | Tensor) -> Ratio:
        """See the class."""
        weight = float(count)
        if not 0 <= weight < math.inf:
            raise UsageError(f"Ratio: count={weight} must be finite and at least 0.")
        if isinstance(sum, Tensor):
            if sum.dim() != 0:
                raise UsageError(
                    f"Ratio: the sum is a tensor of shape {list(sum.shape)}. Add it up to one "
                    "number before reporting it, or report one Ratio per entry."
                )
            total: Any = sum.detach().to(torch.float64)
        else:
            total = float(sum)
        # A tensor, for which 0 / 0 raises no error: a shard may have nothing to count.
        mean = total / weight if weight else torch.zeros((), dtype=torch.float64, device="cpu")
        ratio = super().__new__(cls, (mean, weight))
        ratio.sum = total
        return ratio

    def __getnewargs__(self) -> tuple[Any, float]:
        return (self.sum, self.weight)

    @property
    def mean(self) -> Any:
        """``sum / count``, 0 if the count is 0."""
        return self[0]

    @property
    def weight(self) -> float:
        """The count."""
        return self[1]

    def __float__(self) -> float:
        return float(self.mean)

    def __repr__(self) -> str:
        return f"Ratio({self.sum}, {self.weight:g})"
