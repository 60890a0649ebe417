"""The memory of the means that scripts see as ``p.grad``.

Every ``p.grad`` is a tensor of its own, as after a plain backward pass: what a script keeps over
``zero_grad()`` (PCGrad, a gradient's similarity to the one before) keeps its values, and what it
saves holds one gradient. Memory is used again only where nobody else holds it, so that a step of a
usual script allocates nothing. What this costs is one copy of the gradients per step; see
``gradient_as_bucket_view`` of `create_multi_node_optimizer`.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

_USE_COUNT = getattr(torch._C, "_storage_Use_Count", None)


class GradientMemory:
    """One tensor for each parameter, which is its ``p.grad`` or waits to be it again. Local."""

    def __init__(self) -> None:
        self._kept: dict[nn.Parameter, _Kept] = {}

    def set(self, parameter: nn.Parameter, mean: Tensor) -> None:
        """Make ``parameter.grad`` a copy of ``mean``.

        Where ``p.grad`` is the mean of an earlier pass it changes in place, as gradients that are
        accumulated do; else whoever holds an earlier gradient keeps its values.
        """
        kept = self._kept.get(parameter)
        if not (
            kept is not None
            and kept.suits(parameter)
            and (parameter.grad is kept.tensor or not kept.is_held())
        ):
            kept = self._kept[parameter] = _Kept(parameter)
        kept.tensor.copy_(mean)
        if parameter.grad is not kept.tensor:
            parameter.grad = kept.tensor

    def is_mean(self, parameter: nn.Parameter) -> bool:
        """Whether ``p.grad`` is the mean of an earlier pass, maybe with a later one added."""
        kept = self._kept.get(parameter)
        return kept is not None and parameter.grad is kept.tensor

    def clear(self) -> None:
        """Let go of all memory; every ``p.grad`` stays."""
        self._kept.clear()


class _Kept:
    """A tensor, and how often it is referred to while nobody else does."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.tensor = torch.empty_like(parameter, requires_grad=False)
        self._stride = parameter.stride()
        self._counts = self._count()

    def suits(self, parameter: nn.Parameter) -> bool:
        """Whether it may be the gradient of this parameter as it is now."""
        tensor = self.tensor
        return (
            tensor.shape == parameter.shape
            and tensor.dtype == parameter.dtype
            and tensor.device == parameter.device
            and self._stride == parameter.stride()
        )

    def is_held(self) -> bool:
        """Whether somebody else holds the tensor, a view of it or an array in its memory."""
        return _USE_COUNT is None or self._count() != self._counts

    def _count(self) -> tuple[int, int]:
        num_tensors = 0
        if _USE_COUNT is not None:
            num_tensors = _USE_COUNT(self.tensor.untyped_storage()._cdata)
        return sys.getrefcount(self.tensor), num_tensors
