"""Sums of a few numbers and tensors over ranks: what `Communicator.sum_over_ranks` computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchmn.comm.reductions import dense
from torchmn.errors import RankMismatchError, UsageError


def summand(value: object) -> Tensor | float:
    """A value as it is sent: a number, or a tensor on the CPU.

    Raises UsageError: it is something else.
    """
    if isinstance(value, Tensor):
        return dense("sum_over_ranks", value).detach().cpu()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (int, float)):
        return value + 0  # a bool counts
    if isinstance(value, np.ndarray):
        raise UsageError(
            "sum_over_ranks got a numpy array. It adds numbers and tensors: pass torch.as_tensor(x)"
            " and call .numpy() on the sum."
        )
    raise UsageError(
        f"sum_over_ranks got a {type(value).__name__}. It adds numbers and tensors: pass the parts "
        "of a container one by one, and use allreduce_obj for other objects."
    )


def sums_of(
    gathered: Sequence[Sequence[Tensor | float]], own: Sequence[Tensor | float]
) -> tuple[Tensor | float, ...]:
    """The sums of all ranks' values, in rank order; tensors on the devices of ``own``.

    Raises RankMismatchError on all ranks: they do not fit.
    """
    counts = [len(theirs) for theirs in gathered]
    if len(set(counts)) > 1:
        raise RankMismatchError(
            f"sum_over_ranks: ranks 0 to {len(counts) - 1} passed {counts} values. Pass the same "
            "number on every rank."
        )
    return tuple(
        _sum(index, column, like)
        for index, (column, like) in enumerate(zip(zip(*gathered, strict=True), own, strict=True))
    )


def _sum(index: int, column: Sequence[Tensor | float], like: Tensor | float) -> Tensor | float:
    tensors = [value for value in column if isinstance(value, Tensor)]
    numbers = [value for value in column if not isinstance(value, Tensor)]
    total = _sum_of_numbers(numbers)
    if not tensors:
        return total
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(shape != shapes[0] for shape in shapes):
        raise RankMismatchError(
            f"sum_over_ranks: value {index} is a tensor of the shapes {shapes} on the ranks. Pass "
            "tensors of the same shape on every rank."
        )
    dtype = tensors[0].dtype
    for value in column:
        dtype = torch.promote_types(dtype, _dtype_of(value, dtype))
    wide = torch.float64 if dtype.is_floating_point else dtype
    added = torch.stack([tensor.to(wide) for tensor in tensors]).sum(0)  # integers in int64
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    return (added + total).to(device, dtype if dtype.is_floating_point else added.dtype)


def _sum_of_numbers(numbers: Sequence[float]) -> float:
    """Exact for integers, rounded once for floats."""
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # infinities, which sum() adds as floats do
        return float(sum(numbers))


def _dtype_of(value: Tensor | float, other: torch.dtype) -> torch.dtype:
    """As torch promotes: a number counts by its kind only."""
    if isinstance(value, Tensor):
        return value.dtype
    return torch.result_type(torch.empty(1, dtype=other, device="cpu"), value)
