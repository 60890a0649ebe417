"""Values of single samples from all ranks: in the order of the data set, and by their index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchmn.base.errors import UsageError
from torchmn.base.torch_private import tree_map
from torchmn.data.scattered_batches import ScatteredBatches

if TYPE_CHECKING:
    from torchmn.comm import Communicator


def gather_outputs(loader: DataLoader[Any], outputs: Sequence[Any]) -> Any:
    """The outputs for all samples in the order of the data set, on all ranks. *Collective.*

    Call it after a loop over ``loader`` under ``torch.no_grad()``. Each sample of the pass appears
    once, even if a sampler has drawn it several times; what ``drop_last`` or the sampler left out
    is missing. To gather labels as well, let each output be a tuple: ``(model(x), y)``.

    Args:
        loader: a loader that `scatter_loader` returned.
        outputs: one for each batch that the loop has received; for n samples tensors or arrays of
            shape ``(n, ...)``, lists of n objects, or tuples and dicts of these.

    Returns the same structure for all samples; an empty list if no rank had a batch.

    Raises UsageError: ``loader`` is not from `scatter_loader`; on all ranks, the number of outputs
    is not that of the batches, or an output has another number of rows than its batch.

    >>> loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=3)
    >>> loader = torchmn.scatter_loader(loader, comm)
    >>> with torch.no_grad():
    ...     outputs = [2 * x for x in loader]
    >>> gather_outputs(loader, outputs)
    tensor([0., 2., 4., 6.])
    """
    batches = loader.batch_sampler
    if not isinstance(batches, ScatteredBatches):
        raise UsageError("gather_outputs needs a DataLoader that scatter_loader has returned.")
    return _gathered(batches.received_indices(), outputs, batches.comm)[1]


def gather_by_index(
    indices: Tensor | Sequence[int], values: Any, comm: Communicator
) -> tuple[Tensor, Any]:
    """The samples of all ranks by index, each once, and their values. *Collective.*

    For what a script keeps of each sample, such as features, losses or pseudo-labels: all ranks
    write the same, ``memory[indices] = values``. The data set returns the index with the sample.

    Args:
        indices: the indices of this rank's samples, shape ``(n,)``; n may be 0 or differ on ranks.
        values: tensors or arrays of shape ``(n, ...)``, lists of n objects, or tuples and dicts of
            these. They are detached.
        comm: the ranks.

    Returns the indices in ascending order, shape ``(samples,)`` on the CPU, and the values in this
    order. If an index occurs several times, its last value in rank order is returned.

    Raises UsageError, on all ranks: indices are not integers, or values have another number of
    rows.

    >>> gather_by_index([2, 0], torch.tensor([0.5, 0.25]), comm)
    (tensor([0, 2]), tensor([0.2500, 0.5000]))
    """
    return _gathered([indices], [values], comm)


def _gathered(
    indices: Sequence[Any], values: Sequence[Any], comm: Communicator
) -> tuple[Tensor, Any]:
    """Indices and values by batch, of all batches and ranks. *Collective.*"""
    own: Any = (
        f"{len(values)} outputs for the {len(indices)} batches that the last loop under "
        "torch.no_grad() over the loader has received. Keep one output for each batch."
    )
    if len(indices) == len(values):
        try:
            own = [*map(_batch, indices, values)]
        except (TypeError, ValueError) as error:
            own = str(error)
    # A problem is sent in place of values: all ranks raise it, and none waits for the others.
    everyone = comm.allgather_obj(own)
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise UsageError(f"Rank {rank}: {theirs}")
    batches = [batch for theirs in everyone for batch in theirs if len(batch[0])]
    if not batches:
        return torch.empty(0, dtype=torch.int64, device="cpu"), []
    where = np.concatenate([index for index, _ in batches])
    # `unique` returns the first position of each index: in reverse order, that of the last value.
    unique, from_end = np.unique(where[::-1], return_index=True)
    order = len(where) - 1 - from_end
    try:
        joined = tree_map(_join, *(value for _, value in batches), is_leaf=_is_list)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"The outputs of batches cannot be joined ({type(error).__name__}: {error}). If rows "
            "of different batches differ in size, pass a list with one tensor for each sample."
        ) from error
    return torch.from_numpy(unique), tree_map(lambda x: _rows(x, order), joined, is_leaf=_is_list)


def _batch(indices: Any, values: Any) -> tuple[np.ndarray[Any, Any], Any]:
    """The indices and values of a batch. Raises ValueError, TypeError: not one for each sample."""
    where = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices).reshape(-1)
    if len(where) and where.dtype.kind not in "iu":
        raise TypeError(f"the indices of samples must be integers, and are {where.dtype}.")

    def checked(value: Any) -> Any:
        num = (
            len(value) if hasattr(value, "__len__") and getattr(value, "ndim", None) != 0 else "no"
        )
        if num != len(where):
            raise ValueError(
                f"an output for {len(where)} samples is a {type(value).__name__} with {num} rows. "
                "It needs one row, or one entry of a list, for each sample."
            )
        return value.detach() if isinstance(value, Tensor) else value

    return where.astype(np.int64), tree_map(checked, values, is_leaf=_is_list)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _join(*parts: Any) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return sum(parts, []) if _is_list(parts[0]) else np.concatenate(parts)


def _rows(value: Any, order: np.ndarray[Any, Any]) -> Any:
    return [value[i] for i in order] if _is_list(value) else value[order]
