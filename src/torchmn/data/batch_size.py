"""The number of samples in a batch, for evaluation, weights, micro-batches and trainers alike.

The top level of a tuple, list or dict holds fields, such as images and labels, and the first field
that has a number of samples gives that of the batch. A field may itself be a list of samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_MAX_CHANNELS = 4
"""Images have at most these: RGB with alpha."""


def num_samples(batch: object) -> int | None:
    """Return the number of samples in a batch; None if it cannot be determined. Local.

    The arguments of a model's forward are a batch, too: a tuple of fields.

    - A tensor or array, nested and jagged ones included, has its first size; a `PackedSequence` the
      number of its sequences; a batch of graphs (PyTorch Geometric) its ``num_graphs``.
    - A tuple, list, named tuple, dict or dataclass holds fields, and the first one that has a
      number of samples counts. Numbers, single strings and tensors without dimensions have none.
    - A field that is a list or tuple of strings, of dicts, or of tensors of one dtype and number of
      dimensions has its length: one item for each sample. Where a later field is a tensor with the
      first size of all its tensors, it holds fields itself, such as two inputs of a model.
    - A list that is the whole batch has its length if it is empty or holds strings, or tensors that
      cannot be fields since their sizes differ: in the first dimension or, for images (C, H, W)
      with up to 4 channels, in any. Put a list of samples of equal sizes into a tuple: ``(x,)``.

    >>> num_samples([torch.zeros(32, 3), torch.zeros(32)])  # as the default collate_fn makes it
    32
    >>> num_samples([torch.zeros(3, height, 50) for height in (40, 60)])  # two images
    2
    >>> num_samples({"images": [torch.zeros(3, 8, 8)] * 5, "lambda": 0.1})
    5
    """
    if type(batch) is list and is_list_of_samples(batch):
        return len(batch)
    own = _of_leaf(batch)
    return own if own is not None else _of_fields(_fields(batch))


def _of_leaf(value: Any) -> int | None:
    """The number of samples of a value that is no container; None if it has none."""
    if isinstance(value, Tensor):
        return value.size(0) if value.dim() else None
    if isinstance(value, np.ndarray):
        return value.shape[0] if value.ndim else None
    if isinstance(value, PackedSequence):  # its data has the time steps of all samples
        return int(value.batch_sizes[0])
    num_graphs = getattr(value, "num_graphs", None)
    return num_graphs if isinstance(num_graphs, int) else None


def _fields(value: Any) -> Sequence[Any]:
    """The items of a container; empty for anything else."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return value
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return ()


def _of_fields(fields: Sequence[Any]) -> int | None:
    """The number of the first field that has one; 0 if none has and one is an empty list."""
    for index, field in enumerate(fields):
        found = _of_field(field, fields[index + 1 :])
        if found is not None:
            return found
    return 0 if any(type(field) is list and not field for field in fields) else None


def _of_field(field: Any, later: Sequence[Any]) -> int | None:
    own = _of_leaf(field)
    if own is not None:
        return own
    items = _fields(field)
    if not items or not has_one_kind(field):
        return _of_fields(items)
    size = _common_size(items)
    if size is not None and any(isinstance(x, Tensor) and _of_leaf(x) == size for x in later):
        return size
    return len(items)


def has_one_kind(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether a list may have one item for each sample: fields often differ in kind."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        return False
    if all(isinstance(item, (Tensor, np.ndarray)) for item in value):
        return len({(item.dtype, item.ndim) for item in value}) == 1
    return all(isinstance(item, (str, bytes)) for item in value) or all(
        isinstance(item, Mapping) for item in value
    )


def _common_size(items: Sequence[Any]) -> int | None:
    """The size in dim 0 that all tensors in a list have; None if they differ."""
    sizes = {_of_leaf(item) for item in items}
    return sizes.pop() if len(sizes) == 1 else None


def is_list_of_samples(batch: list[Any]) -> bool:
    """Whether the items of a list that is the whole batch are samples and not fields."""
    if not batch:
        return True
    if not has_one_kind(batch) or isinstance(batch[0], Mapping):
        return False
    if not isinstance(batch[0], (Tensor, np.ndarray)):
        return True
    if batch[0].ndim == 0:
        return False
    size = _common_size(batch)
    # Fields of a batch have one first size, but so have images: there it is the channels.
    is_image = batch[0].ndim == 3 and size is not None and size <= _MAX_CHANNELS
    return size is None or (is_image and len({tuple(item.shape) for item in batch}) > 1)
