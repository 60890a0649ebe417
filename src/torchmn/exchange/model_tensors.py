"""Which tensors belong to an optimizer and to a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer


class OwnBuffer(NamedTuple):
    """A buffer by its place: a script may replace the tensor."""

    name: str
    """With the path of its module."""
    module: nn.Module
    key: str

    def get(self) -> Tensor | None:
        """The tensor of now. Local."""
        return self.module._buffers.get(self.key)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All that an optimizer trains, in the order of its groups. Local."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def persistent_buffers(model: nn.Module) -> Iterator[OwnBuffer]:
    """The buffers of its ``state_dict``, not those with ``persistent=False``. Local."""
    for path, module in model.named_modules():
        for key in module._buffers:
            if key not in module._non_persistent_buffers_set:
                yield OwnBuffer(f"{path}.{key}" if path else key, module, key)
