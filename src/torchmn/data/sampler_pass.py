"""One ``for`` over a `GlobalSampler`: the number of batches that the script has received.

A DataLoader with workers prefetches batches, so the number it has drawn is not the number that the
loop has received. Its iterator counts the batches it returns, and a pass reads that count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchmn.errors import UsageError

_COUNT = "_num_yielded"
"""Torch's private name; a test checks that it exists."""


class StepCount(Protocol):
    """The attribute of a communicator that tells training from peeking at the data."""

    num_steps: int | None


class SamplerPass:
    """Counts the batches of one pass. It does not keep the loop's iterator alive. Local.

    A pass that was left early without an optimizer step, as ``next(iter(loader))``, was a peek at
    the data. Without a multi-node optimizer of the communicator, steps are not counted; then a peek
    is a pass that was left with its first batch.
    """

    def __init__(self, steps: StepCount, loader: _BaseDataLoaderIter | None) -> None:
        self._steps = steps
        self._num_steps_before = steps.num_steps
        self._num_drawn = 0
        self.is_exhausted = False
        """Whether a batch was requested after the last one."""
        self._fields: dict[str, Any] | None = None
        self._owner: weakref.ref[Any] | None = None
        if loader is not None:
            # Its fields outlive it briefly, so that the last count can still be read.
            self._fields = vars(loader)
            self._owner = weakref.ref(loader, self._record_count)

    def batches(self, indices: Iterator[list[int]]) -> SamplerBatches:
        """The iterator for the loop."""
        batches = SamplerBatches(self, indices)
        if self._owner is None:
            self._owner = weakref.ref(batches)
        return batches

    def count_drawn(self) -> None:
        """Count a batch that was drawn."""
        self._num_drawn += 1

    def end(self) -> None:
        """Record that no batch was left."""
        self.is_exhausted = True

    @property
    def num_handed_out(self) -> int:
        """The number of batches that the script has received."""
        fields = self._fields
        return self._num_drawn if fields is None else int(fields.get(_COUNT, self._num_drawn))

    @property
    def was_left(self) -> bool:
        """Whether the loop has left it, so that its last batch was requested."""
        return self._owner is not None and self._owner() is None

    @property
    def was_peek(self) -> bool:
        """Whether no step was taken on its batches, given that it was left early."""
        if self._steps.num_steps is None:
            return self.num_handed_out <= 1
        return self._steps.num_steps == (self._num_steps_before or 0)

    def _record_count(self, _: object) -> None:
        self._num_drawn, self._fields = self.num_handed_out, None


class SamplerBatches:
    """The iterator of one pass."""

    def __init__(self, counted_by: SamplerPass, indices: Iterator[list[int]]) -> None:
        self._pass = counted_by
        self._indices = indices

    def __iter__(self) -> SamplerBatches:
        return self

    def __next__(self) -> list[int]:
        batch = next(self._indices, None)
        if batch is None:
            self._pass.end()
            raise StopIteration
        self._pass.count_drawn()
        return batch


def iterating_loader(sampler: object, caller: FrameType | None) -> _BaseDataLoaderIter | None:
    """The iterator of the DataLoader that iterates over ``sampler``, or None.

    Raises UsageError: the sampler was given as ``sampler=``.
    """
    owner = None if caller is None else caller.f_locals.get("self")
    if isinstance(owner, BatchSampler) and owner.sampler is sampler:
        raise UsageError(
            "A GlobalSampler yields whole batches, but DataLoader(sampler=...) expects single "
            "indices. Write DataLoader(dataset, batch_sampler=sampler), without batch_size."
        )
    return owner if isinstance(owner, _BaseDataLoaderIter) else None
