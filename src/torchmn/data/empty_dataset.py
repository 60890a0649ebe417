"""A data set of the same length with nothing in it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from torchmn.data.sub_dataset import SizedDataset


class EmptyDataset(Dataset[tuple[()]]):
    """``length`` samples, each an empty tuple.

    Example:
        >>> len(EmptyDataset(3)), EmptyDataset(3)[0]
        (3, ())
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[()]:
        if not -self._length <= index < self._length:
            raise IndexError(f"Sample {index} of an empty data set with {self._length} samples.")
        return ()


def create_empty_dataset(dataset: SizedDataset[Any]) -> EmptyDataset:
    """A data set as long as ``dataset`` whose samples are ``()``. Local.

    For ranks of a model-parallel group that take no input: their iterators make the same number of
    iterations as those of the other ranks.

    >>> empty = create_empty_dataset(["a", "b"])
    >>> len(empty), empty[0]
    (2, ())
    """
    return EmptyDataset(len(dataset))
