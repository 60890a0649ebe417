"""The memory of the means that scripts see as ``p.grad``.

Every ``p.grad`` has a storage of its own, as after a plain backward pass: what a script keeps over
``zero_grad()`` (PCGrad, the similarity to an earlier gradient) keeps its values, and what it saves
holds one gradient. In ordinary memory of a CPU or GPU the storage is a part of a bucket
(`Slot.lend`), so that means need no copy; a bucket gets new memory before it is filled again if a
script still uses the old one. In other memory (buffers that the ranks of a node share) means are
copied, and the copies are reused where nothing else refers to them (`GradientMemory`).
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
    """The identity and version of ``p.grad``: differs once it was replaced or changed in place.

    Local. An update through ``.data`` does not count as a change.
    """
    grad = whole_of(parameter).grad
    return (0, 0) if grad is None else (id(grad), version_of(grad))


class GradientMemory:
    """One tensor for each parameter, into which its means are copied as ``p.grad``. Local.

    A parameter may be converted (``model.half()``) while its mean is under way: it then gets new
    memory in its new dtype.
    """

    def __init__(self) -> None:
        self._kept: dict[nn.Parameter, _Kept] = {}

    def set_all(self, parameters: Sequence[nn.Parameter], means: Sequence[Tensor]) -> None:
        """Set every ``p.grad`` to a copy of its mean.

        If ``p.grad`` is the mean of an earlier pass it changes in place, as gradients that are
        accumulated do. Otherwise an earlier gradient that the script holds keeps its values.
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
        """Whether ``p.grad`` is the mean of an earlier pass, possibly with a later one added."""
        kept = self._kept.get(parameter)
        return kept is not None and parameter.grad is kept.tensor

    def clear(self) -> None:
        """Release all memory; every ``p.grad`` stays."""
        self._kept.clear()


class _Kept:
    """A copy of a mean, and the number of its references while no script has any."""

    __slots__ = ("_address", "_unused", "tensor")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.tensor = torch.empty_like(parameter, requires_grad=False)
        self._address = self.tensor.data_ptr()
        self._unused = num_references(self)

    def is_usable(self, parameter: nn.Parameter, grad: Tensor | None) -> bool:
        """Whether the tensor can become the gradient of the parameter as it is now.

        False if anything else refers to the tensor, a view of it, or an array in its memory.
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
    """Counts of references to ``holder.tensor`` and its storage, to be compared with each other.

    The numbers themselves mean nothing: a graph that has saved the tensor is one more Python
    reference in newer versions of torch, but only one more use of the tensor in C++ in torch 2.6.
    """
    tensor = holder.tensor
    storage = storage_address(tensor.untyped_storage())
    return sys.getrefcount(tensor), tensor_use_count(tensor), storage_use_count(storage)


def in_use(slots: Sequence[Slot]) -> list[Slot]:
    """The slots whose tensor a script keeps, or a view of it, or an array in its memory. Local.

    A ``p.grad`` that was not cleared does not count: a backward pass changes it in place anyway.
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
