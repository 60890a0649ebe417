"""The memory of the means that scripts see as ``p.grad``.

Every ``p.grad`` is a tensor of its own, as after a plain backward pass: what a script keeps across
``zero_grad()`` (PCGrad, a gradient's similarity to the one before) keeps its values, and what it
saves holds one gradient. Memory is reused only where nothing else holds it, so that a step of a
usual script allocates nothing. What this costs is one copy of the gradients per step; see
``gradient_as_bucket_view`` of `create_multi_node_optimizer`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_USE_COUNT = getattr(torch._C, "_storage_Use_Count", None)


class GradientMemory:
    """One tensor for each parameter, which is its ``p.grad`` or will be again. Local.

    A parameter may be converted (``model.half()``) while its mean is under way: it then gets new
    memory of its new dtype.
    """

    def __init__(self) -> None:
        self._kept: dict[nn.Parameter, _Kept] = {}

    def set_all(self, parameters: Sequence[nn.Parameter], means: Sequence[Tensor]) -> None:
        """Make every ``p.grad`` a copy of its mean.

        Where ``p.grad`` is the mean of an earlier pass it changes in place, as gradients that are
        accumulated do; else a script that holds an earlier gradient keeps its values.
        """
        tensors = []
        for parameter in parameters:
            kept, grad = self._kept.get(parameter), parameter.grad
            if kept is None or not kept.is_usable(parameter, grad):
                kept = self._kept[parameter] = _Kept(parameter)
            if grad is not kept.tensor:
                parameter.grad = kept.tensor
            tensors.append(kept.tensor)
        if tensors:
            torch._foreach_copy_(tensors, list(means))

    def is_mean(self, parameter: nn.Parameter) -> bool:
        """Whether ``p.grad`` is the mean of an earlier pass, maybe with a later one added."""
        kept = self._kept.get(parameter)
        return kept is not None and parameter.grad is kept.tensor

    def clear(self) -> None:
        """Release all memory; every ``p.grad`` stays."""
        self._kept.clear()


class _Kept:
    """A tensor, and its number of references while nothing else holds it."""

    __slots__ = ("_address", "_num_objects", "_num_tensors", "_storage", "tensor")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.tensor = torch.empty_like(parameter, requires_grad=False)
        self._address = self.tensor.data_ptr()
        self._storage = self.tensor.untyped_storage()
        self._num_objects = sys.getrefcount(self.tensor)
        self._num_tensors = 0 if _USE_COUNT is None else _USE_COUNT(self._storage._cdata)

    def is_usable(self, parameter: nn.Parameter, grad: Tensor | None) -> bool:
        """Whether the tensor can be the gradient of the parameter as it is now.

        Not if anything else holds the tensor, a view of it or an array in its memory.
        """
        return (
            self.tensor.dtype == parameter.dtype
            and self.tensor.device == parameter.device
            and self.tensor.shape == parameter.shape
            and (
                grad is self.tensor
                or (
                    _USE_COUNT is not None
                    and sys.getrefcount(self.tensor) == self._num_objects
                    and _USE_COUNT(self._storage._cdata) == self._num_tensors
                    and self.tensor.data_ptr() == self._address  # else by p.grad.data = ...
                )
            )
        )
