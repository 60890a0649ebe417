"""Some of the samples of a batch, for batches that were made before they are divided."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.data.batch_size import has_one_kind, is_list_of_samples, num_samples

_CONSTANTS = (type(None), str, bytes, int, float, complex, Tensor, np.ndarray, np.generic)


def rows_of(batch: Any, begin: int, end: int, num: int) -> Any:
    """Samples ``begin`` .. ``end - 1`` of a batch of ``num``, which `num_samples` has found. Local.

    Fields are read as `num_samples` reads them: tensors and arrays have one row for each sample,
    lists one item. Numbers, single strings and tensors without dimensions are in every part.

    Raises UsageError: a field has another number of rows, or is of a kind that has none.

    >>> rows_of({"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": 2.0}, 1, 3, 4)
    {'x': tensor([1, 2]), 'names': ['b', 'c'], 'scale': 2.0}
    """

    def rows(field: Any) -> Any:
        if isinstance(field, (Tensor, np.ndarray)) and field.ndim:
            if len(field) == num:
                return field[begin:end]
        elif isinstance(field, (list, tuple)) and _has_samples(field, num):
            return field[begin:end]
        elif isinstance(field, (Mapping, list, tuple)) or dataclasses.is_dataclass(field):
            return mapped(rows, field)
        elif isinstance(field, _CONSTANTS):
            return field
        raise UsageError(
            f"a batch of {num} samples cannot be divided: a field of it, a {type(field).__name__}, "
            f"has {getattr(field, 'shape', 'no')} rows. Let the batch consist of tensors, arrays "
            "and lists with one row or item for each sample, give the DataLoader a batch_size, or "
            "let each rank read its share (read_by='each_rank')."
        )

    if type(batch) is list and is_list_of_samples(batch):
        return batch[begin:end]
    is_container = isinstance(batch, (Mapping, list, tuple))
    return mapped(rows, batch) if is_container else rows(batch)


def _has_samples(items: list[Any] | tuple[Any, ...], num: int) -> bool:
    """Whether the items of a field are samples and not fields themselves."""
    return len(items) == num and (
        has_one_kind(items) or not any(num_samples((item,)) == num for item in items)
    )


def mapped(function: Callable[..., Any], fields: Any, *others: Any) -> Any:
    """Apply a function to each field of containers with the same fields; keep the first's class.

    >>> mapped(max, {"x": 1, "y": 5}, {"x": 3, "y": 4})
    {'x': 3, 'y': 5}
    """
    if isinstance(fields, Mapping):
        values = {
            key: function(value, *(other[key] for other in others)) for key, value in fields.items()
        }
        if type(fields) is dict or not isinstance(fields, MutableMapping):
            return values
        copied: Any = copy.copy(fields)  # of its own class, which may have methods: `to(device)`
        copied.update(values)
        return copied
    if dataclasses.is_dataclass(fields):
        names = [each.name for each in dataclasses.fields(fields)]
        own = {
            name: function(*(getattr(each, name) for each in (fields, *others))) for name in names
        }
        return dataclasses.replace(fields, **own)  # type: ignore[type-var]
    items = map(function, fields, *others)
    return type(fields)(*items) if hasattr(fields, "_fields") else type(fields)(items)
