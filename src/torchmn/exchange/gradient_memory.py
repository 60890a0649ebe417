"""The memory of the means that scripts see as ``p.grad``.

Every ``p.grad`` has a storage of its own, as after a plain backward pass: what a script keeps over
``zero_grad()`` (PCGrad, the similarity to an earlier gradient) keeps its values, and what it saves
holds one gradient. In ordinary CPU memory the storage is a part of a bucket (`Slot.lend`), so that
means need no copy; a bucket gets new memory before it is filled again if a script still uses the
old one. In other memory (GPUs, buffers that the ranks of a node share) means are copied, and the
copies are reused where nothing else refers to them (`GradientMemory`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchmn.base.torch_private import (
    COUNTS_USES,
    storage_address,
    storage_use_count,
    tensor_use_count,
    version_of,
)
from torchmn.exchange.sharded_parameters import whole_of

if TYPE_CHECKING:
    from torchmn.exchange.buckets import Slot

CAN_COUNT = COUNTS_USES  # if not, no memory is used again


GradientState = tuple[int, int]


def gradient_state(parameter: Tensor) -> GradientState:
    """What tells whether ``p.grad`` was changed in place or replaced since. Local."""
    grad = whole_of(parameter).grad
    return (0, 0) if grad is None else (id(grad), version_of(grad))


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
    """A copy of a mean, and how often it is referred to while only we do."""

    __slots__ = ("_address", "_unused", "tensor")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.tensor = torch.empty_like(parameter, requires_grad=False)
        self._address = self.tensor.data_ptr()
        self._unused = num_references(self)

    def is_usable(self, parameter: nn.Parameter, grad: Tensor | None) -> bool:
        """Whether the tensor can be the gradient of the parameter as it is now.

        Not if anything else refers to the tensor, a view of it or an array in its memory.
        """
        return (
            self.tensor.dtype == parameter.dtype
            and self.tensor.device == parameter.device
            and self.tensor.shape == parameter.shape
            and (
                grad is self.tensor
                or (
                    CAN_COUNT
                    and num_references(self) == self._unused
                    and self.tensor.data_ptr() == self._address  # else by p.grad.data = ...
                )
            )
        )


def num_references(holder: Slot | _Kept) -> tuple[int, int, int]:
    """How often ``holder.tensor`` and its storage are referred to. Compare, do not interpret.

    A graph that has saved the tensor is one more Python reference in newer versions of torch, and
    in torch 2.6 only one more use of the tensor in C++.
    """
    tensor = holder.tensor
    storage = storage_address(tensor.untyped_storage())
    return sys.getrefcount(tensor), tensor_use_count(tensor), storage_use_count(storage)


def in_use(slots: Sequence[Slot]) -> list[Slot]:
    """The slots of which a script keeps the tensor, a view of it or an array in its memory. Local.

    A ``p.grad`` that was not cleared does not count: a backward pass changes it in place.
    """
    found = []
    for slot in slots:
        unused = slot.unused
        if unused is None or slot.parameter.grad is slot.tensor:
            continue
        tensor = slot.tensor  # as many variables refer to it here as in num_references
        storage = storage_address(tensor.untyped_storage())
        counts = (sys.getrefcount(tensor), tensor_use_count(tensor), storage_use_count(storage))
        if counts != unused or tensor.data_ptr() != slot.address:
            found.append(slot)
    return found
