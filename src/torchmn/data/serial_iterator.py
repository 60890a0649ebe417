"""Chainer's SerialIterator: batches wrap around the end of the epoch and are always full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from torch.utils.data import default_collate

from torchmn.base.errors import UsageError
from torchmn.data.permutations import Order, draw_seed, keyed_permutation
from torchmn.data.scatter import SHARDS_DIFFER
from torchmn.data.sub_dataset import SizedDataset

if TYPE_CHECKING:
    from torchmn.comm import Communicator

Batch = TypeVar("Batch")


class SerialIterator(Generic[Batch]):
    """Batches of a data set in order, read on demand. Local.

    With ``repeat=True`` a batch that reaches the end of the epoch continues with the next one, so
    all batches are full; the epoch ends in the iteration whose batch reaches the end
    (``is_new_epoch``). 2,500 samples in batches of 32 make epochs of 79, 78, 78, 78 iterations,
    where a DataLoader makes 79 each time. With ``repeat=False`` the last batch is short and is
    followed by StopIteration.

    Unlike in Chainer, the order of epoch e is a function of (seed, e), so the state is a few
    numbers and resuming is exact; batches are collated to tensors.

    Args:
        dataset: anything with a length and samples by index. If it grows, an epoch has the samples
            that were there when it began.
        batch_size: samples per batch, of this rank.
        repeat: continue after the end of the epoch.
        shuffle: draw a new order for each epoch.
        seed: 0 or more; None draws one, which ``state_dict`` keeps.
        collate_fn: makes a batch of a list of samples; ``list`` gives Chainer's batches.

    Raises:
        UsageError: ``batch_size`` is below 1, or ``repeat=True`` with an empty data set.

    >>> iterator = SerialIterator(range(5), 3, shuffle=False, collate_fn=list)
    >>> next(iterator), next(iterator), iterator.epoch, iterator.epoch_detail
    ([0, 1, 2], [3, 4, 0], 1, 1.2)
    """

    def __init__(
        self,
        dataset: SizedDataset[Any],
        batch_size: int,
        *,
        repeat: bool = True,
        shuffle: bool = True,
        seed: int | None = None,
        collate_fn: Callable[[list[Any]], Batch] = default_collate,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} must be at least 1.")
        if seed is not None and seed < 0:
            raise UsageError(f"seed={seed} must be 0 or more, or None.")
        if repeat and len(dataset) == 0:
            raise UsageError(
                "An iterator cannot repeat a data set of 0 samples. Use fewer ranks or "
                "scatter_dataset(force_equal_length=True), which gives every rank a sample."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.repeat = repeat
        self.shuffle = shuffle
        self.collate_fn = collate_fn
        self._seed = draw_seed() if seed is None else seed
        self.reset()

    def reset(self, seed: int | None = None) -> None:
        """Go back to the beginning of epoch 0, with another seed if one is given."""
        self._seed = self._seed if seed is None else seed
        self.epoch = 0
        self.current_position = 0
        self.is_new_epoch = False
        self._previous_epoch_detail = -1.0
        self._order = self._order_of(0)

    @property
    def epoch_detail(self) -> float:
        """Epochs done, with the fraction of the current one."""
        return self.epoch + self.current_position / max(len(self._order), 1)

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""
        return None if self._previous_epoch_detail < 0 else self._previous_epoch_detail

    def __iter__(self) -> SerialIterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self.repeat and (self.epoch > 0 or len(self._order) == 0):
            raise StopIteration
        self._previous_epoch_detail = self.epoch_detail
        self.is_new_epoch = False
        indices: list[int] = []
        while len(indices) < self.batch_size:
            missing = self.batch_size - len(indices)
            part = self._order[self.current_position : self.current_position + missing]
            indices.extend(int(index) for index in part)
            self.current_position += len(part)
            if self.current_position >= len(self._order):
                self._begin_epoch(self.epoch + 1)
                if not self.repeat:
                    break
        return self.collate_fn([self.dataset[index] for index in indices])

    next = __next__

    def state_dict(self) -> dict[str, int | float | bool]:
        """The numbers that `load_state_dict` needs to resume with the very next batch."""
        return {
            "epoch": self.epoch,
            "current_position": self.current_position,
            "is_new_epoch": self.is_new_epoch,
            "previous_epoch_detail": self._previous_epoch_detail,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, with its seed.

        Raises UsageError: it is not a state of an iterator over this data set.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise UsageError(
                f"The state of a SerialIterator lacks {', '.join(missing)}. It has "
                f"{', '.join(map(str, state))}."
            )
        position = int(state["current_position"])
        if not 0 <= position <= len(self.dataset):
            raise UsageError(
                f"Position {position} is outside of a data set of {len(self.dataset)} samples. "
                "Was the state saved with another data set or number of ranks?"
            )
        self._seed = int(state["seed"])
        self.epoch = int(state["epoch"])
        self.current_position = position
        self.is_new_epoch = bool(state["is_new_epoch"])
        self._previous_epoch_detail = float(state["previous_epoch_detail"])
        self._order = self._order_of(self.epoch)

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], comm: Communicator
    ) -> dict[str, int | float | bool]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local.

        The number of samples of the epoch that are done, over all ranks, is kept; which ones they
        are is not, see `resume_warnings`. Rank r keeps the seed of old rank r.
        """
        own = states[comm.rank % len(states)]
        epoch = int(own["epoch"])
        done = sum(int(s["current_position"]) for s in states if int(s["epoch"]) == epoch)
        length = len(self.dataset)
        position = min(done // comm.size, max(length - 1, 0))
        before = epoch + (position - self.batch_size) / max(length, 1)
        return {**own, "current_position": position, "previous_epoch_detail": max(before, 0.0)}

    def resume_warnings(self) -> list[str]:
        """Warnings for loading a state of another number of ranks."""
        return [SHARDS_DIFFER]

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.current_position = 0
        self.is_new_epoch = True
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> Order:
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return keyed_permutation(len(self.dataset), self._seed, epoch)
