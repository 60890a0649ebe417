"""A part of a data set, and the ways to cut one into parts on one process."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch.utils.data import Dataset

from torchmn.data.order import draw_seed, permutation
from torchmn.errors import UsageError

Sample = TypeVar("Sample", covariant=True)


@runtime_checkable
class SizedDataset(Protocol[Sample]):
    """What scattering and iterating need: a length and samples by index 0 .. length - 1."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class SubDataset(Dataset[Sample]):
    """Samples ``begin`` .. ``end - 1`` of a data set, counted in ``order`` where one is given.

    A view: samples are read from the data set when they are asked for. Local.

    Args:
        dataset: anything with a length and samples by index.
        begin, end: half open, ``0 <= begin <= end <= len(dataset)``.
        order: permutation of all indices of the data set, shape ``(len(dataset),)``, or None.

    Raises:
        UsageError: the bounds lie outside the data set or ``order`` has another length.

    >>> list(SubDataset("abcde", 1, 4))
    ['b', 'c', 'd']
    """

    def __init__(
        self,
        dataset: SizedDataset[Sample],
        begin: int,
        end: int,
        order: Sequence[int] | np.ndarray[Any, Any] | None = None,
    ) -> None:
        length = len(dataset)
        if not 0 <= begin <= end <= length:
            raise UsageError(
                f"A part {begin}..{end} does not lie inside a data set of {length} samples. "
                "It needs 0 <= begin <= end <= length."
            )
        if order is not None and len(order) != length:
            raise UsageError(
                f"The order has {len(order)} entries and the data set {length} samples. "
                "The order must be a permutation of all samples."
            )
        self.dataset = dataset
        self.begin = begin
        self.end = end
        # A copy, so that the shard does not keep the permutation of the whole data set alive.
        self._indices = None if order is None else np.array(order[begin:end], dtype=np.int64)

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, index: int) -> Sample:
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"Sample {index} of a part with {len(self)} samples.")
        if self._indices is None:
            return self.dataset[self.begin + position]
        return self.dataset[int(self._indices[position])]

    @property
    def indices(self) -> list[int]:
        """The index in the whole data set of every sample, in the order of this part."""
        if self._indices is None:
            return list(range(self.begin, self.end))
        return [int(index) for index in self._indices]


def split_dataset(
    dataset: SizedDataset[Sample], split_at: int
) -> tuple[SubDataset[Sample], SubDataset[Sample]]:
    """The first ``split_at`` samples and the rest. Local.

    Raises UsageError: ``split_at`` lies outside the data set.

    >>> first, rest = split_dataset("abcde", 2)
    >>> len(first), len(rest)
    (2, 3)
    """
    length = len(dataset)
    return SubDataset(dataset, 0, split_at), SubDataset(dataset, split_at, length)


def split_dataset_n_random(
    dataset: SizedDataset[Sample], n: int, seed: int | None = None
) -> list[SubDataset[Sample]]:
    """Cut a data set at random into ``n`` parts of exactly ``len(dataset) // n`` samples. Local.

    The permutation is that of Chainer for the same seed. Also as in Chainer, the remainder of up
    to ``n - 1`` samples is in no part: parallel updaters need parts of equal length.

    Args:
        dataset: anything with a length and samples by index.
        n: number of parts, at least 1.
        seed: 0 .. 2**32 - 1, or None for another cut every time.

    Raises:
        UsageError: ``n`` or ``seed`` is out of range.

    >>> [len(part) for part in split_dataset_n_random(range(11), 3, seed=0)]
    [3, 3, 3]
    """
    if n < 1:
        raise UsageError(f"A data set cannot be cut into {n} parts. Ask for 1 or more.")
    length = len(dataset)
    order = permutation(length, draw_seed() if seed is None else seed)
    size = length // n
    return [SubDataset(dataset, i * size, (i + 1) * size, order) for i in range(n)]
