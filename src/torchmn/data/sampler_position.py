"""One ``for`` over a `GlobalSampler`: the number of batches that the script has received.

A DataLoader with workers prefetches batches, so the number it has drawn is not the number that the
loop has received. Its iterator counts the batches it returns, and a pass reads that count. Nor does
the end of the indices show that the loop has ended: the pass sees the iterator's StopIteration.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchmn.comm.training_start import training_steps
from torchmn.data import rank_seeds
from torchmn.errors import UsageError

if TYPE_CHECKING:
    from torchmn.comm import Communicator

_COUNT, _NEXT, _KEPT = "_num_yielded", "_next_data", "_iterator"
"""Torch's private names, the last one of the DataLoader; tests check that they exist."""


class IteratingLoader(NamedTuple):
    """A DataLoader that iterates over a sampler."""

    iterator: _BaseDataLoaderIter
    loader: object
    """The DataLoader, which holds on to its iterator if its workers are persistent."""


class SamplerPass:
    """Counts the batches of one pass. It does not keep the loop's iterator alive. Local.

    A pass that was left early without an optimizer step, as ``next(iter(loader))``, was a peek at
    the data. Without a multi-node optimizer of the communicator, steps are not counted; then a peek
    is a pass that was left with its first batch.
    """

    def __init__(self, comm: Communicator, source: IteratingLoader | None) -> None:
        self._comm = comm
        self._num_steps_before = training_steps(comm).count
        self._num_drawn = 0
        self.thread: int | None = None
        """The thread that has requested the last batch, where that is seen."""
        self.is_exhausted = False
        """Whether indices were requested after the last ones, by the loop or by prefetching."""
        self._has_ended: bool | None = None
        """None: nothing is between this and the loop, so that `is_exhausted` says it."""
        self._fields: dict[str, Any] | None = None
        self._owner: weakref.ref[Any] | None = None
        self._keeper: weakref.ref[Any] | None = None
        self._streams = rank_seeds.current()
        self._fetches = False
        """Whether the iterator fetches batches itself, and not in workers."""
        if source is not None:
            # Its fields outlive it briefly, so that the last count can still be read.
            self._fields = vars(source.iterator)
            self._owner = weakref.ref(source.iterator, self._record_count)
            self._keeper = None if source.loader is None else weakref.ref(source.loader)
            self._watch_end(source.iterator)
            if comm.rank > 0 and not self._fetches:
                self._streams.draw_apart()  # the seed of workers, which comes next

    def batches(self, indices: Iterator[list[int]]) -> Iterator[list[int]]:
        """The iterator for the loop."""
        batches = self._counted(indices)
        if self._owner is None:
            self._owner = weakref.ref(batches)
        return batches

    def _counted(self, indices: Iterator[list[int]]) -> Iterator[list[int]]:
        self._streams.draw_together(has_seed_of_workers=True)
        for batch in indices:
            self.count_drawn()
            if self._fetches:
                self._streams.draw_apart()  # until the batch is fetched
            yield batch
        self.is_exhausted = True

    def count_drawn(self) -> None:
        """Count a batch that was drawn."""
        self._num_drawn += 1

    @property
    def num_handed_out(self) -> int:
        """The number of batches that the script has received."""
        fields = self._fields
        return self._num_drawn if fields is None else int(fields.get(_COUNT, self._num_drawn))

    @property
    def has_ended(self) -> bool:
        """Whether the loop has requested a batch after the last one."""
        return self.is_exhausted if self._has_ended is None else self._has_ended

    @property
    def was_left(self) -> bool:
        """Whether the loop has left it, so that its last batch was requested.

        A DataLoader with persistent workers keeps its iterator; then no loop holds it any more.
        """
        if self._owner is None:
            return False
        if self._owner() is None:
            return True
        keeper = None if self._keeper is None else self._keeper()
        if keeper is None or vars(keeper).get(_KEPT) is not self._owner():
            return False
        # One reference is that of the keeper, and one that of the call.
        return sys.getrefcount(self._owner()) <= 2

    @property
    def was_peek(self) -> bool:
        """Whether no step was taken on its batches, given that it was left early."""
        if training_steps(self._comm).count is None:
            return self.num_handed_out <= 1
        return training_steps(self._comm).count == (self._num_steps_before or 0)

    def _watch_end(self, iterator: _BaseDataLoaderIter) -> None:
        """Take note when the iterator of a DataLoader ends the loop."""
        original: Callable[[Any], Any] | None = getattr(type(iterator), _NEXT, None)
        if original is None:
            return
        self._has_ended, owner, streams = False, weakref.ref(iterator), self._streams
        self._fetches = iterator._num_workers == 0

        def next_data() -> Any:
            self.thread = threading.get_ident()
            try:
                return original(owner())
            except StopIteration:
                self._has_ended = True
                raise
            finally:
                streams.draw_together()

        vars(iterator)[_NEXT] = next_data

    def _record_count(self, _: object) -> None:
        self._num_drawn, self._fields = self.num_handed_out, None


def iterating_loader(sampler: object, caller: FrameType | None) -> IteratingLoader | None:
    """The DataLoader that iterates over ``sampler``, or None.

    Raises UsageError: the sampler was given as ``sampler=``.
    """
    variables = {} if caller is None else caller.f_locals
    owner = variables.get("self")
    if isinstance(owner, BatchSampler) and owner.sampler is sampler:
        raise UsageError(
            "A GlobalSampler yields whole batches, but DataLoader(sampler=...) expects single "
            "indices. Write DataLoader(dataset, batch_sampler=sampler), without batch_size."
        )
    if not isinstance(owner, _BaseDataLoaderIter):
        return None
    return IteratingLoader(owner, variables.get("loader"))
