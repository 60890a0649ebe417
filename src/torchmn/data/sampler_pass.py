"""One ``for`` over a `GlobalSampler`: how many of its batches the script has got.

A DataLoader with workers draws batches ahead of the loop, so what it has drawn is not what the loop
has got. Its iterator counts what it hands out, and a pass that is driven by one asks it.
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
"""Torch's name for it, which a test of ours holds it to."""


class StepCount(Protocol):
    """What of a communicator tells training from looking at the data."""

    num_steps: int | None


class SamplerPass:
    """Counts the batches of one pass. It does not keep the loop's iterator alive. Local.

    A pass that was left early, and during which no optimizer was stepped, was a look at the data:
    ``next(iter(loader))``. Where no multi-node optimizer was made with the communicator nobody
    says when a step is taken; then a look is a pass that was left with its first batch.
    """

    def __init__(self, steps: StepCount, loader: _BaseDataLoaderIter | None) -> None:
        self._steps = steps
        self._num_steps_before = steps.num_steps
        self._num_drawn = 0
        self.is_exhausted = False
        """Whether somebody asked for a batch after the last one."""
        self._fields: dict[str, Any] | None = None
        self._owner: weakref.ref[Any] | None = None
        if loader is not None:
            # Its fields outlive it for a moment, so that the last count can still be read.
            self._fields = vars(loader)
            self._owner = weakref.ref(loader, self._settle)

    def batches(self, indices: Iterator[list[int]]) -> SamplerBatches:
        """The iterator that the loop gets."""
        batches = SamplerBatches(self, indices)
        if self._owner is None:
            self._owner = weakref.ref(batches)
        return batches

    def count_drawn(self) -> None:
        """One more batch was drawn."""
        self._num_drawn += 1

    def end(self) -> None:
        """There was no batch left to draw."""
        self.is_exhausted = True

    @property
    def num_handed_out(self) -> int:
        """Batches that the script has or had in its hands."""
        fields = self._fields
        return self._num_drawn if fields is None else int(fields.get(_COUNT, self._num_drawn))

    @property
    def was_left(self) -> bool:
        """Whether nobody can ask for another batch of it."""
        return self._owner is not None and self._owner() is None

    @property
    def was_a_look(self) -> bool:
        """Whether nothing was trained on its batches, given that it was left before its end."""
        if self._steps.num_steps is None:
            return self.num_handed_out <= 1
        return self._steps.num_steps == (self._num_steps_before or 0)

    def _settle(self, _: object) -> None:
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


def asking_loader(sampler: object, caller: FrameType | None) -> _BaseDataLoaderIter | None:
    """The iterator of a DataLoader, if it is what asks ``sampler`` for its batches.

    Raises UsageError: the sampler was given as ``sampler=``.
    """
    owner = None if caller is None else caller.f_locals.get("self")
    if isinstance(owner, BatchSampler) and owner.sampler is sampler:
        raise UsageError(
            "A GlobalSampler makes whole batches, and DataLoader(sampler=...) puts batches of them "
            "together again. Write DataLoader(dataset, batch_sampler=sampler), without batch_size."
        )
    return owner if isinstance(owner, _BaseDataLoaderIter) else None
