"""Squared norms of the ranks' own gradients and of their mean, in exchanges that are measured.

The own norm is that of what is packed, since the sum takes its place. The footer brings, for a rank
with weight w, b samples and the gradient g, the sums over ranks of

    w |g|²,  w / b,  w² / b

which are NaN if what was packed is not the gradient of the samples that were counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 1 << 14
"""Elements whose squares are added in their own precision: 30 million would lose 0.3 %."""
_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class GradientNorms:
    """What was measured in one exchange, the same on all ranks. Weights w add up to 1 here."""

    step: int
    num_samples: float
    """Of all ranks."""
    own_square: float
    """The sum of w |g|²."""
    mean_square: float
    """|sum of w g|²."""
    own_noise: float
    """The sum of w / b: how many times the variance of one sample is in `own_square`."""
    mean_noise: float
    """The sum of w² / b: how many times it is in `mean_square`."""


class NormListener(Protocol):
    """Is given the norms of gradients."""

    def wants(self, step: int) -> bool:
        """Whether the exchanges of a step are measured; the same on all ranks. Local."""

    def measured(self, norms: GradientNorms) -> None:
        """An exchange has ended. Called on all ranks with the same numbers; local."""


def squared_norms(values: Tensor) -> Tensor:
    """Of the blocks of a flat tensor, in float64."""
    dtype = torch.float32 if values.dtype in _NARROW else values.dtype
    return torch.stack(torch._foreach_norm(values.split(_BLOCK), 2, dtype)).double().square()


def total_of(squares: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of what `squared_norms` has returned; a GPU is not waited for."""
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat([each.to(device) for each in squares]).sum()


def own_terms(
    packed: Tensor, factor: float, weight: float, samples: float, *, is_own: bool
) -> tuple[Tensor | float, float, float]:
    """What one rank adds to the footer.

    ``packed`` is the square of ``factor`` times its gradient; ``is_own``: of one backward pass, and
    not added to a mean.
    """
    if weight == 0 or factor == 0:
        return 0.0, 0.0, 0.0
    if not is_own:
        return math.nan, math.nan, math.nan
    share = weight / samples if samples else math.inf
    return packed * (weight / factor**2), share, share * weight
