"""Squared norms of the ranks' own gradients and of their mean, in exchanges that are measured.

A rank's own norm is taken of its packed gradient, before the sum overwrites it. The footer brings,
for ranks with weight w, b samples and the gradient g, the sums over ranks of

    w |g|²,  w / b,  w² / b

which are NaN if some rank packed something other than the gradient of the samples it counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 1 << 14
"""Number of elements whose squares are added in their own dtype; 30 million would lose 0.3 %."""
_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class GradientNorms:
    """Norms measured in one exchange, the same on all ranks. Here the weights w add up to 1."""

    step: int
    num_samples: float
    """Samples of all ranks."""
    own_square: float
    """The sum over ranks of w |g|²."""
    mean_square: float
    """The squared norm of the mean, |sum of w g|²."""
    own_noise: float
    """The sum of w / b: the variance of one sample contributes this many times to `own_square`."""
    mean_noise: float
    """The sum of w² / b: the variance of one sample contributes this many times to
    `mean_square`."""


class NormListener(Protocol):
    """An object that is told the norms of gradients."""

    def wants(self, step: int) -> bool:
        """Whether exchanges of this step are measured; the same on all ranks. Local."""

    def measured(self, norms: GradientNorms) -> None:
        """Called when an exchange has ended, on all ranks with the same numbers. Local."""


def squared_norms(values: Tensor) -> Tensor:
    """The squared norms of the blocks of a flat tensor, (num_blocks,), in float64."""
    dtype = torch.float32 if values.dtype in _NARROW else values.dtype
    return torch.stack(torch._foreach_norm(values.split(_BLOCK), 2, dtype)).double().square()


def total_of(squares: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of some results of `squared_norms`, (), on ``device``. Does not wait for a GPU."""
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat([each.to(device) for each in squares]).sum()


def own_terms(
    packed: Tensor, factor: float, weight: float, samples: float, *, is_own: bool
) -> tuple[Tensor | float, float, float]:
    """This rank's terms of the three sums in the footer.

    Args:
        packed: the squared norm of the packed gradient.
        factor: the factor by which the gradient was multiplied when it was packed.
        weight: the rank's weight.
        samples: the rank's number of samples.
        is_own: whether the gradient is that of one backward pass, not added to an earlier mean.
    """
    if weight == 0 or factor == 0:
        return 0.0, 0.0, 0.0
    if not is_own:
        return math.nan, math.nan, math.nan
    share = weight / samples if samples else math.inf
    return packed * (weight / factor**2), share, share * weight
