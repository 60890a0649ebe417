"""Batches of loaders: their number of samples, their device, and calling a function with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Result = TypeVar("Result")


def num_samples(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch; None if there is none. Local.

    A batch is a tensor or array ``(samples, ...)``, or a tuple, named tuple, list or dict that
    contains one at any depth. Without any tensor, the length of a list of strings is used.

    >>> num_samples([np.zeros((32, 3)), np.zeros(32)])
    32
    """
    found = _first_dimension(batch)
    return found if found is not None else _num_texts(batch)


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


def _first_dimension(batch: Any) -> int | None:
    if isinstance(batch, (Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, PackedSequence):  # its data has the time steps of all samples
        return int(batch.batch_sizes[0])
    for part in _parts(batch):
        found = _first_dimension(part)
        if found is not None:
            return found
    return None


def _num_texts(batch: Any) -> int | None:
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], (str, bytes)):
        return len(batch)
    for part in _parts(batch):
        found = _num_texts(part)
        if found is not None:
            return found
    return None


def _parts(batch: Any) -> Sequence[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return batch
    return ()
