"""Batches of loaders: their device, and calling a function with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Result = TypeVar("Result")


def batch_to(batch: Any, device: torch.device | str | None) -> Any:
    """The batch with its tensors on ``device``; None leaves it as it is. Local.

    Example:
        >>> batch_to({"x": torch.ones(2), "name": "a"}, "cpu")["x"].device
        device(type='cpu')
    """
    if device is None:
        return batch
    if isinstance(batch, (Tensor, PackedSequence)):
        return batch.to(torch.device(device), non_blocking=True)  # type: ignore[arg-type]
    if isinstance(batch, Mapping):
        return {name: batch_to(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(batch_to(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(batch_to(part, device) for part in batch)
    return batch


def call_with_batch(function: Callable[..., Result], batch: Any) -> Result:
    """Call a function with a batch as pytorch-pfn-extras' Evaluator does.

    A tuple or list becomes the arguments, a dict the keyword arguments; a named tuple and anything
    else is the one argument.

    Example:
        >>> call_with_batch(lambda x, t: x + t, (1, 2)), call_with_batch(lambda x: x, {"x": 3})
        (3, 3)
    """
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return function(*batch)
    if isinstance(batch, dict):
        return function(**batch)
    return function(batch)
