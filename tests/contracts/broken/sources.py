"""Minibatch sources that are wrong, by what they put in place of a part of the right ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchmn.cntk.readers import randomization, read_ahead
from torchmn.cntk.readers.minibatch_plan import MinibatchPlan, Progress
from torchmn.cntk.readers.minibatch_source import MinibatchSource
from torchmn.cntk.readers.randomization import GlobalMinibatch, SequenceOrder
from torchmn.cntk.readers.read_ahead import MinibatchesAhead

_partition, _take, _next = GlobalMinibatch.partition, SequenceOrder.take, MinibatchSource._next


def partitions_by_chunk(patch):
    """CNTK's: a chunk is on one partition, so ranks starve."""

    def by_chunk(self, num_partitions, index):
        return [
            replace(part, begin=at, end=at + 1)
            for part in self.parts
            for at in range(part.begin, part.end)
            if part.block.chunks[at] % num_partitions == index
        ]

    patch.setattr(GlobalMinibatch, "partition", by_chunk)


def same_order_each_sweep(patch):
    """The sweep is not in the seed."""

    permutation = randomization.keyed_permutation
    patch.setattr(
        randomization,
        "keyed_permutation",
        lambda length, seed, sweep, *key: permutation(length, seed, 0, *key),
    )


def counts_its_own_partition(patch):
    """``max_samples`` counts the samples of one partition."""

    def after(before, minibatch):
        own = -(-minibatch.num_samples // 2)
        return Progress(minibatch.next_position, before.num_samples + own)

    patch.setattr(Progress, "after", after)


def drops_short_minibatches(patch):
    """A minibatch with fewer samples than partitions is left out where it is empty."""

    def drop(self, *arguments):
        found = _next(self, *arguments)
        while found and not any(part.num_samples for part in found.values()):
            found = _next(self, *arguments)
        return found

    patch.setattr(MinibatchSource, "_next", drop)


def counts_sequences(patch):
    """The size of a minibatch is a number of sequences."""

    patch.setattr(
        randomization.Block,
        "ends",
        property(lambda self: np.arange(1, len(self) + 1)),
    )


def saves_what_is_read_ahead(patch):
    """The state is that of the last minibatch that threads have begun to read."""

    def state(self):
        begun = self._ahead._begun
        return self._plan.state(begun[-1].after if begun else self._progress)

    patch.setattr(MinibatchSource, "get_checkpoint_state", state)


def keeps_its_read_ahead(patch):
    """A restored source returns what it had read ahead."""

    restore = MinibatchSource.restore_from_checkpoint

    def restored(self, state):
        with patch.context() as inner:
            inner.setattr(MinibatchesAhead, "forget", lambda self: None)
            restore(self, state)

    patch.setattr(MinibatchSource, "restore_from_checkpoint", restored)


def keeps_chunks(patch):
    """No chunk is dropped."""

    patch.setattr(read_ahead.Chunks, "keep_only", lambda self, chunk_ids: None)


def reads_each_sweep_again(patch):
    """Chunks are dropped although all fit into the window."""

    patch.setattr(MinibatchPlan, "keeps_all_chunks", False)


def loses_the_minibatch_of_an_error(patch):
    """After an error the next minibatch is returned."""

    def next_one(self, request, *arguments):
        try:
            return _next(self, request, *arguments)
        except Exception:
            self._ahead.forget()
            self._progress = self._progress.after(self._plan.take(self._progress, request))
            raise

    patch.setattr(MinibatchSource, "_next", next_one)
