"""The position of a stream, where its loader or its data set keeps one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torchmn.data.counted_loader import loader_copy
from torchmn.data.stream_parts import loses_samples


class PositionedDataset(IterableDataset[Any]):
    """A data set whose state is its position, also at its end and after a resumed pass. Local.

    A data set that has ended may report the state of its beginning; a DataLoader reads it to its
    end already for a short last batch. And after a state was loaded, a data set may begin every
    later pass there, not only the next one.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._has_ended = False
        self._is_loaded = False  # whether the next pass begins where the state says
        self._beginning: Any = None

    def __iter__(self) -> Iterator[Any]:
        if not self._is_loaded and self._beginning is not None:
            self.dataset.load_state_dict(self._beginning)
            self._beginning = None
        is_over = self._has_ended and self._is_loaded
        self._has_ended = self._is_loaded = False
        # Not in the generator, which begins with the first sample: a data set may draw random
        # numbers in `__iter__`, and does so when the DataLoader makes its iterator.
        return self._samples(iter(() if is_over else self.dataset))

    def _samples(self, samples: Iterator[Any]) -> Iterator[Any]:
        yield from samples
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        """The position after the samples that were read."""
        state = None if self._has_ended else copy.deepcopy(self.dataset.state_dict())
        return {"has_ended": self._has_ended, "dataset": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue at the position."""
        self._has_ended, self._is_loaded = state["has_ended"], True
        if self._beginning is None:
            self._beginning = copy.deepcopy(self.dataset.state_dict())
        if not self._has_ended:
            self.dataset.load_state_dict(state["dataset"])


def positioned(source: Any) -> Any:
    """The source, with its data set replaced by a `PositionedDataset` where possible. Local.

    Workers read copies of a data set, which this process cannot ask.
    """
    is_read_here = isinstance(source, DataLoader) and source.num_workers == 0
    dataset = source.dataset if is_read_here else None
    if isinstance(dataset, IterableDataset) and _keeps_position(dataset):
        return loader_copy(source, dataset=PositionedDataset(dataset))
    return source


def holder_of(source: Any) -> Any:
    """What keeps the position: the loader, or its `PositionedDataset`; None if nothing does."""
    if _keeps_position(source):
        return source
    dataset = getattr(source, "dataset", None)
    return dataset if isinstance(dataset, PositionedDataset) else None


def _keeps_position(each: Any) -> bool:
    """Whether the state of a loader or data set is its position."""
    if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
        return False
    try:
        inspect.signature(each.state_dict).bind()
    except TypeError:  # it wants to be told what was read, as that of litdata
        return False
    return not loses_samples(each)
