"""Sums and weights of reported values in float64, for means over batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchmn.base.errors import UsageError

Sums = dict[str, tuple[float, float]]
"""Maps names to (weighted sum, weight)."""


class WeightedSums:
    """Adds up the reported values of one rank. Tensors stay on their device, without a sync.

    Example:
        >>> sums = WeightedSums()
        >>> sums.add("loss", 1.0, weight=3)
        >>> sums.add("loss", 2.0, weight=1)
        >>> means_of(sums.sums())
        {'loss': 1.25}
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, float]] = {}

    @classmethod
    def of(cls, sums: Mapping[str, Sequence[float]]) -> WeightedSums:
        """Restore from `sums`, bit-identically."""
        held = cls()
        held._sums = {name: (total, weight) for name, (total, weight) in sums.items()}
        return held

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def add(self, name: str, value: Any, weight: float = 1) -> None:
        """Add a value with ``weight``; a `Ratio` or a (value, weight) has its own.

        Raises UsageError: the value is not a scalar.
        """
        total, weight = _weighted(name, value, weight)
        before, weight_before = self._sums.get(name, (0.0, 0.0))
        after = before + total if weight else before  # a value of weight 0 may be NaN
        self._sums[name] = after, weight_before + weight

    def sums(self) -> Sums:
        """The sums so far, as numbers."""
        return {name: (float(total), weight) for name, (total, weight) in self._sums.items()}


def merge_sums(parts: Sequence[Sums]) -> Sums:
    """Add the sums of all ranks; names in the order of the ranks.

    Bit-identical for the same parts in any order.

    Example:
        >>> merge_sums([{"loss": (3.0, 3.0)}, {"loss": (2.0, 1.0)}])
        {'loss': (5.0, 4.0)}
    """
    merged = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        totals, weights = zip(*(part[name] for part in parts if name in part), strict=True)
        # `fsum` rounds once, so that order does not matter; it raises for inf - inf.
        is_finite = all(map(math.isfinite, totals))
        merged[name] = (math.fsum(totals) if is_finite else sum(totals), math.fsum(weights))
    return merged


def means_of(sums: Sums) -> dict[str, float]:
    """Divide each sum by its weight; NaN if the weight is 0.

    Example:
        >>> means_of({"loss": (5.0, 4.0)})
        {'loss': 1.25}
    """
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}


def scalars_of(observation: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an observation that have means, as in pytorch-pfn-extras but silently.

    Example:
        >>> scalars_of({"loss": 0.5, "name": "a", "tensor": torch.ones(2)})
        {'loss': 0.5}
    """
    return {name: value for name, value in observation.items() if has_mean(value)}


def has_mean(value: Any) -> bool:
    """Whether a value can be averaged: a scalar, a (value, weight), or a function returning one."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim == 0
    return isinstance(value, (tuple, int, float, np.number, np.bool_)) or callable(value)


def raise_if_no_mean(name: str, value: Any) -> None:
    """Raise UsageError if a reported value cannot be averaged."""
    if has_mean(value):
        return
    kind = f"of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)[:40]
    raise UsageError(
        f"'{name}' was reported as a {type(value).__name__} {kind}, which has no mean over "
        "samples. Report scalars or Ratio(sum, count), one name per entry."
    )


def _weighted(name: str, value: Any, weight: float) -> tuple[Any, float]:
    """(value x weight, weight) in float64."""
    if isinstance(value, Ratio):
        return value.sum, value.weight
    if isinstance(value, tuple) and len(value) == 2:  # pytorch-pfn-extras: (value, weight)
        value, weight = value[0], float(value[1])
    if callable(value):  # pytorch-pfn-extras: a lazy value
        value = value()
    raise_if_no_mean(name, value)
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64) * weight, weight
    return float(value) * weight, weight


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
