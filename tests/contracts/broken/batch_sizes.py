"""Wrong in how they count the samples of a batch, by the contract that must catch each.

The first five are those that torchmn had at the same time, and they disagreed.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from torchmn.data import num_samples


def first_tensor_at_any_depth(batch):
    """An image of a list is taken for the batch: 3 samples, its channels."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    for part in parts if isinstance(parts, (list, tuple)) else ():
        found = first_tensor_at_any_depth(part)
        if found is not None:
            return found
    return None


def dicts_only(batch):
    """Does not look into lists: images are not counted at all."""
    for value in batch if isinstance(batch, tuple) else (batch,):
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
        if isinstance(value, Mapping):
            found = dicts_only(tuple(value.values()))
            if found is not None:
                return found
    return None


def leaves(batch):
    """Flattens as Lightning does, so that a PackedSequence has its time steps."""
    sizes = [leaf.size(0) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return sizes[0] if sizes else 0


def length(batch):
    """Takes the fields of a batch for its samples."""
    return len(batch) if hasattr(batch, "__len__") else None


def first_item(batch):
    """Looks at the first field only, which may be a scalar."""
    while isinstance(batch, (list, tuple, dict)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else None


def every_list_has_its_length(batch):
    """Takes the list that the default collate makes for one of samples."""
    return len(batch) if isinstance(batch, list) else num_samples(batch)


def no_list_has_its_length(batch):
    """Takes every list that is the whole batch for one of fields."""
    return num_samples(tuple(batch)) if isinstance(batch, list) else num_samples(batch)


def unknown_is_empty(batch):
    """Cannot tell a batch that says nothing from one without samples."""
    return num_samples(batch) or 0


WRONG = [
    first_tensor_at_any_depth,
    dicts_only,
    leaves,
    length,
    first_item,
    every_list_has_its_length,
    no_list_has_its_length,
    unknown_is_empty,
]
