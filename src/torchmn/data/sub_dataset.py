"""A part of a data set, and functions that split one on one process."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol, TypeVar, cast, overload, runtime_checkable

import numpy as np
from torch.utils.data import Dataset

from torchmn.base.errors import UsageError
from torchmn.data import rank_seeds
from torchmn.data.permutations import draw_seed, permutation

Sample = TypeVar("Sample", covariant=True)


@runtime_checkable
class SizedDataset(Protocol[Sample]):
    """A data set with a length and samples by index 0 .. length - 1."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def length_of(sized: object) -> int | None:
    """The length of a data set, loader or sampler; None if it has none. Local."""
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def position_of(index: int, num_samples: int, whole: str) -> int:
    """The position of a sample; a negative index counts from the end. Local.

    Raises IndexError: ``whole``, such as "a part", has no such sample.
    """
    position = operator.index(index)
    if position < 0:
        position += num_samples
    if not 0 <= position < num_samples:
        raise IndexError(f"Sample {index} of {whole} with {num_samples} samples.")
    return position


class SubDataset(Dataset[Sample]):
    """Samples ``begin`` .. ``end - 1`` of a data set, counted in ``order`` where one is given.

    A view: samples are read from the data set on demand. ``part[2:5]`` and
    ``part[[0, 3]]`` are lists of samples, as in Chainer. Local.

    Args:
        dataset: anything with a length and samples by index.
        begin, end: half open, ``0 <= begin <= end <= len(dataset)``.
        order: permutation of all indices of the data set, shape ``(len(dataset),)``, or None.

    Raises:
        UsageError: the bounds are outside of the data set or ``order`` has another length.

    >>> part = SubDataset("abcde", 1, 4)
    >>> list(part), part[1:]
    (['b', 'c', 'd'], ['c', 'd'])
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
                f"A part {begin}..{end} is outside of a data set of {length} samples. "
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
        self.is_of_one_rank = False
        """Whether other ranks have other samples, as shards of `scatter_dataset`."""
        self._streams: rank_seeds.RandomStreams | None = None
        """In a worker process: the streams of the process of the rank, which has started it."""
        # A copy, so that the shard does not keep the permutation of the whole data set alive.
        self._indices = None if order is None else np.array(order[begin:end], dtype=np.int64)

    def __len__(self) -> int:
        return self.end - self.begin

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> list[Sample]: ...

    def __getitem__(self, index: int | slice | Sequence[int]) -> Sample | list[Sample]:
        """One sample; a list of samples for a slice or a list of indices."""
        if isinstance(index, slice):
            return [self._sample(i) for i in range(*index.indices(len(self)))]
        if isinstance(index, (list, tuple)) or getattr(index, "ndim", 0) == 1:
            return [self._sample(i) for i in cast("Sequence[int]", index)]
        return self._sample(cast(int, index))

    def _sample(self, index: int) -> Sample:
        position = position_of(index, len(self), "a part")
        # From numbers that ranks share, torch seeds their workers alike: augmentation must differ.
        if self.is_of_one_rank:
            rank_seeds.fork_in_worker(self._streams)
        if self._indices is None:
            return self.dataset[self.begin + position]
        return self.dataset[int(self._indices[position])]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        if get_spawning_popen() is not None:  # pickled for a process that this one starts
            state["_streams"] = rank_seeds.current()
        return state

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

    Raises UsageError: ``split_at`` is outside of the data set.

    >>> first, rest = split_dataset("abcde", 2)
    >>> len(first), len(rest)
    (2, 3)
    """
    length = len(dataset)
    return SubDataset(dataset, 0, split_at), SubDataset(dataset, split_at, length)


def split_dataset_n_random(
    dataset: SizedDataset[Sample], n: int, seed: int | None = None
) -> list[SubDataset[Sample]]:
    """Split a data set at random into ``n`` parts of exactly ``len(dataset) // n`` samples. Local.

    The permutation is that of Chainer for the same seed. Also as in Chainer, the remainder of up
    to ``n - 1`` samples is in no part: parallel updaters need parts of equal length.

    Args:
        dataset: anything with a length and samples by index.
        n: number of parts, at least 1.
        seed: 0 .. 2**32 - 1, or None for a different split every time.

    Raises:
        UsageError: ``n`` or ``seed`` is out of range.

    >>> [len(part) for part in split_dataset_n_random(range(11), 3, seed=0)]
    [3, 3, 3]
    """
    if n < 1:
        raise UsageError(f"n={n} must be at least 1: the number of parts.")
    length = len(dataset)
    order = permutation(length, draw_seed() if seed is None else seed)
    size = length // n
    return [SubDataset(dataset, i * size, (i + 1) * size, order) for i in range(n)]
