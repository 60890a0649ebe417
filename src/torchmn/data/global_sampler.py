"""The order of samples as a function of the seed and the epoch, not of the number of ranks.

Epoch e is one permutation of (seed, e), and the k-th global batch is its k-th slice. Each global
batch is divided among the ranks, contiguously and as evenly as possible. So the samples of a step
are the same in the same order for any number of ranks, and a run can stop on one number of ranks
and resume on another without losing or repeating a sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from torch.utils.data import default_collate

from torchmn.base.errors import CheckpointWarning, UsageError
from torchmn.base.warn import warn
from torchmn.comm.training_start import training_steps
from torchmn.data.batch_rows import mapped
from torchmn.data.batch_settings import BatchSettings, HasBatchSettings
from torchmn.data.batch_shares import BatchShares
from torchmn.data.counted_loader import PassSampler
from torchmn.data.dataset_comparison import raise_if_datasets_differ
from torchmn.data.divided_batches import LoaderPass, divided_batches, proportion_of
from torchmn.data.equal_arguments import raise_if_ranks_differ
from torchmn.data.permutations import Order, keyed_permutation
from torchmn.data.sub_dataset import SizedDataset

if TYPE_CHECKING:
    from torchmn.comm import Communicator


class _Place(TypedDict):
    epoch: int
    position: int


class SamplerState(_Place, total=False):
    """``position`` counts samples of the epoch, so it holds for any number of ranks.

    ``shares`` is there if ranks get other than equal shares, see `BatchShares.state_at`.
    """

    shares: list[list[int]]


_CURE = "Use loader = torchmn.scatter_loader(loader, comm), which counts what the loop has received"


class GlobalSampler(PassSampler):
    """This rank's parts of the global batches, for ``DataLoader(batch_sampler=...)``.

    The constructor is *collective* (the arguments are compared); everything else is *local*.

    One pass over the sampler (one ``for`` over its DataLoader) goes from the current position to
    the end of the epoch; the next pass is the next epoch. All ranks make the same number of steps,
    ``len(sampler)`` in a full epoch.

    Give the DataLoader to `scatter_loader`: the position then counts the batches that the loop has
    received, and ``state_dict()`` after a step is the state after that step. In a plain DataLoader
    it counts what was drawn, which is ahead of the loop where workers prefetch: a warning says so,
    and ``state_after(n)`` is the state after n batches. A pass that is left early without an
    optimizer step, as ``next(iter(loader))``, is a peek at the data and does not change the
    position. (As long as there is no multi-node optimizer over ``comm``, a peek is a pass that was
    left after its first batch.)

    Optimizers of `create_multi_node_optimizer` over ``comm`` weight the ranks by their parts, as
    with `scatter_loader`, unless ``weight=`` is given.

    If the last global batch of an epoch has fewer samples than there are ranks, the part of the
    last ranks is empty. With `scatter_loader` they get a batch of 0 rows and participate in the
    step with weight 0. Else choose ``drop_last`` or ``pad_last``, or give the DataLoader
    ``collate_fn=EmptyBatchCollate(dataset)``.

    Args:
        dataset_length: the whole data set, which ranks then compare, or the number of its samples.
        comm: gives rank and size.
        global_batch: samples per step over all ranks together.
        seed: 0 or more; same on all ranks.
        shuffle: False keeps the order 0, 1, 2, ... in every epoch.
        drop_last: drop the last global batch if it is not full. With shuffling, the samples that
            are dropped differ between epochs.
        pad_last: if the last global batch has fewer samples than there are ranks, give one of its
            samples to each rank that would have none.

    Raises:
        UsageError: an argument is out of range, or an epoch would be empty.
        RankMismatchError: ranks passed different arguments, or data sets whose samples or order
            differ, as far as that can be detected; all ranks raise.

    Example:
        >>> sampler = torchmn.GlobalSampler(10, comm, global_batch=4, shuffle=False)
        >>> list(sampler), sampler.epoch
        ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], 1)
    """

    def __init__(
        self,
        dataset_length: int | SizedDataset[Any],
        comm: Communicator,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        *,
        drop_last: bool = False,
        pad_last: bool = False,
    ) -> None:
        dataset = None
        if not isinstance(dataset_length, (int, np.integer)):
            dataset, dataset_length = dataset_length, len(dataset_length)
        # Compared before they are checked: what the checks raise, all ranks raise.
        raise_if_ranks_differ(
            comm,
            "GlobalSampler",
            {
                "is a data set": dataset is not None,
                "dataset_length": dataset_length,
                "global_batch": global_batch,
                "seed": seed,
                "shuffle": shuffle,
                "drop_last": drop_last,
                "pad_last": pad_last,
            },
        )
        if dataset is not None:
            raise_if_datasets_differ("GlobalSampler", [(dataset, False)], comm)
        if dataset_length < 0:
            raise UsageError(f"dataset_length={dataset_length} must be 0 or more.")
        if global_batch < 1:
            raise UsageError(
                f"global_batch={global_batch} must be at least 1: the number of samples per step "
                "over all ranks."
            )
        if seed < 0:
            raise UsageError(f"seed={seed} must be 0 or more.")
        if drop_last and pad_last:
            raise UsageError(
                "drop_last=True drops the last global batch and pad_last=True fills it. Give only "
                "one of them."
            )
        if drop_last and 0 < dataset_length < global_batch:
            raise UsageError(
                f"drop_last=True drops all {dataset_length} samples with global batches of "
                f"{global_batch}. Use a smaller global_batch, or drop_last=False."
            )
        self.dataset_length = dataset_length
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.pad_last = pad_last
        self.rank = comm.rank
        self.size = comm.size
        super().__init__(comm, "GlobalSampler")
        divided_batches(comm).note()
        self.shares = BatchShares(comm.size)
        """How a batch is divided among the ranks."""
        self.batch: HasBatchSettings | None = None
        """The `GlobalBatch` that has made this sampler, if one has."""
        self._start = SamplerState(epoch=0, position=0)
        self._num_steps_before: int | None = None
        """Steps of optimizers when the last pass began."""
        self._is_ahead = self._has_warned = False

    @property
    def epoch(self) -> int:
        """The epoch of the next batch to be drawn."""
        return self._now()["epoch"]

    @property
    def position(self) -> int:
        """Samples of this epoch that loops have received so far, over all ranks."""
        return self.state_dict()["position"]

    @property
    def local_batch(self) -> int:
        """This rank's share of a full global batch."""
        return self._next_sizes()[self.rank]

    def batch_settings(self) -> BatchSettings | None:
        """See `HasBatchSettings`."""
        if self.batch is not None:
            return self.batch.batch_settings()
        return BatchSettings(
            global_batch=self.global_batch,
            initial=self.global_batch,
            shares=[*self._next_sizes()],
            epoch_steps=len(self),
        )

    def __len__(self) -> int:
        """Steps in a full epoch; a pass that resumes in the middle of one makes fewer."""
        return self._num_batches(SamplerState(epoch=self.epoch, position=0))

    @property
    def samples_seen(self) -> int:
        """Samples of the data before the current position, over all ranks and epochs.

        It counts the samples that loops have received and those that ``drop_last`` has dropped in
        ended epochs. One that ``pad_last`` has repeated counts once.
        """
        return self._samples_before(self.state_dict())

    @property
    def samples_drawn(self) -> int:
        """Like `samples_seen`, plus the batches that workers have prefetched."""
        return self._after(0 if self._pass is None else self._pass.num_drawn)

    def _after(self, num_batches: int) -> int:
        """The samples before the end of a number of batches of the last pass."""
        return self._samples_before(self._place_after(num_batches))

    def _next_sizes(self) -> Sequence[int]:
        return self.shares.sizes(self.global_batch, self._samples_before(self._now()))

    def _samples_before(self, state: SamplerState) -> int:
        return state["epoch"] * self.dataset_length + state["position"]

    @property
    def batches_left(self) -> int:
        """Global batches from the current position to the end of the epoch."""
        return self._num_batches(self._now())

    @property
    def received_batch(self) -> int:
        """Samples over all ranks of the batch that the loop has received last; 0 before one.

        Raises UsageError: workers of a DataLoader that is not ours have prefetched others.
        """
        return self.received_at[1]

    @property
    def received_at(self) -> tuple[int, int]:
        """The start, counted as in `samples_seen`, and the size of the last batch received.

        Raises as `received_batch`.
        """
        if self._is_known_ahead:
            raise UsageError(
                f"{self._comm.rank_label}: workers of a DataLoader have prefetched batches of this "
                f"GlobalSampler, so the size of the current batch is not known. {_CURE}."
            )
        num = 0 if self._pass is None else self._pass.num_received
        begin = self._after(max(0, num - 1))
        return begin, self._after(num) - begin

    def _started(self, one_pass: LoaderPass) -> None:
        # The DataLoader of a loop with workers requests two iterators before it draws.
        self._leave_pass()
        last = self._pass
        self._is_ahead = not one_pass.is_of_loader and last is not None and last.num_drawn == 0
        self._start = self._reached(is_left=True)
        self._num_steps_before = training_steps(self._comm).count
        one_pass.before_next = self.shares.before_next

    def _parts(self, one_pass: LoaderPass) -> Iterator[list[int]]:
        return self._parts_from(self._start, one_pass)

    def _parts_from(self, state: SamplerState, one_pass: LoaderPass) -> Iterator[list[int]]:
        """This rank's parts from a state to the end of its epoch."""
        order, position = self.order(state["epoch"]), state["position"]
        for num_batches, size in self._segments(state):
            for _ in range(num_batches):
                batch = order[position : position + size]
                at = self._samples_before(SamplerState(epoch=state["epoch"], position=position))
                position += len(batch)
                if self.pad_last and len(batch) < self.size:
                    batch = np.resize(batch, self.size)  # repeats from its first sample
                sizes = self.shares.sizes(len(batch), at)
                begin = sum(sizes[: self.rank])
                end = begin + sizes[self.rank]
                if torch.is_grad_enabled():
                    one_pass.add(end - begin, len(batch), proportion_of(sizes))
                yield [int(index) for index in batch[begin:end]]
        if self.dataset_length == 0:
            self._go_to(state["epoch"] + 1)

    def _go_to(self, epoch: int, position: int = 0) -> None:
        """Let the next pass begin here."""
        self._leave_pass()
        self._start, self._pass = SamplerState(epoch=epoch, position=position), None

    def _leave_pass(self) -> None:
        """Tell the shares what they have not seen of a pass: what followed its last batch."""
        last = self._pass
        if last is not None and last.num_received and not last.has_ended:
            self.shares.before_next(last.num_received)

    def order(self, epoch: int) -> Order:
        """The permutation of an epoch, shape ``(dataset_length,)``."""
        if not self.shuffle:
            return np.arange(self.dataset_length)
        return keyed_permutation(self.dataset_length, self.seed, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; does nothing if it is already in progress.

        ``for epoch in range(sampler.epoch, n): sampler.set_epoch(epoch)`` resumes in the middle.
        Raises UsageError: the epoch is negative.
        """
        if epoch < 0:
            raise UsageError(f"epoch={epoch} must be 0 or more.")
        if epoch != self.epoch:
            self._go_to(epoch)

    def state_dict(self) -> SamplerState:
        """The state after the batches that the loop has received. The same on all ranks."""
        if self._is_known_ahead and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._comm.rank_label}: the position of this GlobalSampler includes batches "
                "that workers of a DataLoader have prefetched: training resumed from its state "
                f"would skip them. {_CURE}, or state_after(n).",
                CheckpointWarning,
            )
        return self._with_shares(self._now())

    def _with_shares(self, state: SamplerState) -> SamplerState:
        shares = self.shares.state_at(self._samples_before(state))
        return {**state, "shares": shares} if shares else state

    @property
    def _is_known_ahead(self) -> bool:
        """Whether workers have drawn batches that the loop may not have received."""
        last = self._pass
        return self._is_ahead and not (
            last is None or last.num_drawn == 0 or (last.has_ended and last.was_left)
        )

    def _now(self) -> SamplerState:
        return self._reached(is_left=self._pass is not None and self._pass.was_left)

    def state_after(self, num_batches: int) -> SamplerState:
        """The state after the first ``num_batches`` of the current or last pass.

        Save it where something other than a DataLoader prefetches batches.

        Raises UsageError: the pass has fewer batches.
        """
        num_all = self._num_batches(self._start)
        if not 0 <= num_batches <= num_all:
            raise UsageError(
                f"state_after({num_batches}): the pass that began at sample "
                f"{self._start['position']} of epoch {self._start['epoch']} has {num_all} batches. "
                "Count the batches since the loop over the DataLoader began."
            )
        return self._with_shares(self._state_after(num_batches))

    def _state_after(self, num_batches: int) -> SamplerState:
        return self._normalised(self._place_after(num_batches))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, also of another number of ranks or another global batch.

        Raises UsageError: it is not a state of this sampler.
        """
        try:
            epoch, position = int(state["epoch"]), int(state["position"])
            shares = [[int(number) for number in row] for row in state.get("shares", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{state!r} is not a state of a GlobalSampler, which has the integers 'epoch' and "
                "'position'."
            ) from error
        if epoch < 0 or not 0 <= position <= self.dataset_length:
            raise UsageError(
                f"Epoch {epoch}, position {position} is outside of a data set of "
                f"{self.dataset_length} samples. Was the state saved with another data set?"
            )
        self.shares.load_state(shares)
        self._go_to(epoch, position)

    def misfit(self, comm: Communicator) -> str:
        """Why `scatter_loader` cannot use this sampler on these ranks; "" if it can. Local."""
        if (comm.rank, comm.size) == (self.rank, self.size):
            return ""
        return (
            f"a DataLoader whose GlobalSampler divides among {self.size} ranks, and the "
            f"communicator has {comm.size}. Pass both the same communicator."
        )

    def _reached(self, *, is_left: bool) -> SamplerState:
        """The state after the batches received so far; ``is_left``: the loop has left the pass."""
        if self._pass is None:
            return self._normalised(self._start)
        num = self._pass.num_received
        has_ended = self._pass.has_ended and num == self._num_batches(self._start)
        if is_left and not has_ended and self._was_peek(num):
            num = 0
        return self._state_after(num)

    def _was_peek(self, num_received: int) -> bool:
        """Whether no step was taken on the batches of the last pass, given that it was left."""
        if training_steps(self._comm).count is None:
            return num_received <= 1
        return training_steps(self._comm).count == (self._num_steps_before or 0)

    def _size_at(self, state: SamplerState) -> tuple[int, int]:
        """The size of the global batch that begins here, and the position until which it lasts."""
        return self.global_batch, self.dataset_length

    def _segments(self, state: SamplerState) -> Iterator[tuple[int, int]]:
        """Yield (number, size) of the global batches left in the epoch; the last may be short."""
        epoch, position = state["epoch"], state["position"]
        while position < self.dataset_length:
            size, until = self._size_at(SamplerState(epoch=epoch, position=position))
            num = -(-(until - position) // size)
            if self.drop_last:
                num = min(num, (self.dataset_length - position) // size)
            if num == 0:
                return
            yield num, size
            position += num * size

    def _num_batches(self, state: SamplerState) -> int:
        """Global batches from a state to the end of its epoch."""
        return sum(num for num, _ in self._segments(state))

    def _place_after(self, num_batches: int) -> SamplerState:
        """Where a number of batches of the last pass end, in its epoch."""
        position = self._start["position"]
        for num, size in self._segments(self._start):
            position += min(num, num_batches) * size
            num_batches -= min(num, num_batches)
        position = min(position, self.dataset_length)
        return SamplerState(epoch=self._start["epoch"], position=position)

    def _normalised(self, state: SamplerState) -> SamplerState:
        """Replace the end of an epoch by the beginning of the next, unless epochs are empty."""
        if self.dataset_length and self._num_batches(state) == 0:
            return SamplerState(epoch=state["epoch"] + 1, position=0)
        return SamplerState(epoch=state["epoch"], position=state["position"])


class EmptyBatchCollate:
    """A collate function that also accepts no samples: every tensor then has 0 rows. Local.

    The result has the structure, dtypes and other sizes of a batch of sample 0. Comparing it with a
    batch that has this sample twice shows what belongs to samples: the dimension in which a tensor
    is larger becomes 0 (the first one, if there is not exactly one), and a list that is longer
    becomes empty. A number that differs, such as a count, raises UsageError.

    Args:
        dataset: sample 0 is read from it for the first empty batch.
        collate_fn: makes a batch of a list of samples.

    Example:
        >>> collate = torchmn.data.EmptyBatchCollate([(torch.zeros(3), 1)])
        >>> [part.shape for part in collate([])]
        [torch.Size([0, 3]), torch.Size([0])]
    """

    def __init__(
        self,
        dataset: SizedDataset[Any],
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of a list of samples, which may be empty."""
        if samples:
            return self.collate_fn(samples)
        sample = self.dataset[0]
        batch = self.collate_fn([sample])
        if isinstance(batch, list) and len(batch) == 1 and batch[0] is sample:
            return []  # it makes no arrays: a batch is the list of its samples
        two = self.collate_fn([copy.deepcopy(sample), copy.deepcopy(sample)])
        return _without_rows(batch, two)


def _without_rows(batch: Any, two: Any) -> Any:
    """Remove the only sample from a batch; ``two`` is a batch that has the sample twice."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        longer = [dim for dim in range(batch.ndim) if batch.shape[dim] != two.shape[dim]]
        return batch[(slice(None),) * (longer[0] if len(longer) == 1 else 0) + (slice(0),)]
    is_text = isinstance(batch, (str, bytes))
    has_items = isinstance(batch, Sequence) and not is_text and not hasattr(batch, "_fields")
    if has_items and (len(batch) != len(two) or all(isinstance(x, (str, bytes)) for x in batch)):
        return type(batch)()  # of one element per sample
    if has_items or isinstance(batch, (Mapping, tuple)):
        return mapped(_without_rows, batch, two)
    if isinstance(batch, (int, float, str, bytes, type(None))) and batch == two:
        return batch
    raise UsageError(
        f"EmptyBatchCollate cannot make a batch of no samples from a {type(batch).__name__}, which "
        "a rank gets where a batch has fewer samples than there are ranks. Give the DataLoader "
        "drop_last=True, or let collate_fn return tensors, or tuples, lists and dicts of them."
    )
