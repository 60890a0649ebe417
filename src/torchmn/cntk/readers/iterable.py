"""Minibatch sources as what PyTorch's loops iterate over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.cntk.readers.minibatch_source import MinibatchSource
from torchmn.cntk.readers.streams import InputMap, wanted_streams
from torchmn.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from torchmn.comm import Communicator

NUM_SLOTS = 256
Collate = Callable[[dict[Any, MinibatchData]], Any]


def tensors(minibatch: dict[Any, MinibatchData]) -> dict[Any, torch.Tensor]:
    """The samples of each stream, for streams whose sequences have one sample each.

    Raises UnsupportedError: a stream has longer sequences.
    """
    for key, stream in minibatch.items():
        if stream.lengths is not None:
            raise UnsupportedError(
                f"{key!r} has sequences of several samples, so its tensor alone does not say where "
                "one ends. Pass collate_fn, such as lambda minibatch: minibatch[...].padded()."
            )
    return {key: stream.data for key, stream in minibatch.items()}


class MinibatchIterator:
    """A source as the iterator of a `torchmn.StandardUpdater`: an epoch is a sweep. Local.

    A minibatch may go over the end of a sweep, as with `torchmn.SerialIterator`. A rank whose part
    is empty gets tensors of 0 rows, which the updater steps with at weight 0.

    Args:
        source: without an end, if a trainer says when to stop.
        minibatch_size: samples over all ranks.
        input_map: the keys of a batch; None: the names of the streams.
        comm: whose ranks divide each minibatch; None: there is one.
        device: where the samples go.
        collate_fn: makes a batch of a dict of `MinibatchData`; without it a batch is a dict of
            tensors.

    ``torchmn.StandardUpdater(MinibatchIterator(source, 64, comm=comm), optimizer, model)``

    Example:
        >>> from torchmn.cntk.readers import MinibatchSourceFromData
        >>> source = MinibatchSourceFromData({"x": torch.arange(4)})
        >>> next(MinibatchIterator(source, 2, comm=comm))["x"].tolist()
        [0, 1]
    """

    def __init__(
        self,
        source: MinibatchSource,
        minibatch_size: int,
        *,
        input_map: InputMap | None = None,
        comm: Communicator | None = None,
        device: torch.device | str | None = None,
        collate_fn: Collate = tensors,
    ) -> None:
        self.source = source
        self.minibatch_size = minibatch_size
        self._input_map = _by_name(source) if input_map is None else input_map
        self._partition = (1, 0) if comm is None else (comm.size, comm.rank)
        self._device = device
        self._collate_fn = collate_fn
        self.is_new_epoch = False
        self.previous_epoch_detail: float | None = None

    @property
    def epoch(self) -> int:
        """Sweeps done."""
        return self.source.sweep

    @property
    def epoch_detail(self) -> float:
        """Sweeps done, with the part of the current one."""
        return self.source.sweep_detail

    @property
    def iterations_per_epoch(self) -> Fraction | None:
        """The mean number of minibatches in a sweep; None if that is not known without reading."""
        samples = self.source.num_samples_of_sweep
        return None if samples is None else Fraction(samples, self.minibatch_size)

    def __iter__(self) -> MinibatchIterator:
        return self

    def __next__(self) -> Any:
        before = self.epoch_detail
        minibatch = self.source.next_minibatch(
            self.minibatch_size, self._input_map, self._device, *self._partition
        )
        if not minibatch:
            raise StopIteration
        self.previous_epoch_detail = before
        self.is_new_epoch = next(iter(minibatch.values())).sweep_end
        return self._collate_fn(minibatch)

    def state_dict(self) -> dict[str, Any]:
        """The state of the source, valid for any number of ranks."""
        return self.source.get_checkpoint_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the very next sample."""
        self.source.restore_from_checkpoint(state)
        self.is_new_epoch, self.previous_epoch_detail = False, self.epoch_detail


class MinibatchDataset(IterableDataset[Any]):
    """A source for ``DataLoader(dataset, batch_size=None)``. Local.

    One pass (one ``for``) goes to the end of the sweep, and the next pass is the next sweep; no
    minibatch goes over the end of one. Each rank gets its part of each global minibatch, of 0 rows
    if there is nothing for it, so all ranks get the same number of minibatches.

    With ``num_workers`` each worker process reads every n-th minibatch, in place of the threads of
    the source, and the loader returns them in order. A pass that is left early then counts as a
    whole one; without workers the next pass continues it.

    Args:
        source: is read by this data set alone.
        minibatch_size: samples over all ranks.
        input_map: the keys of a batch; None: the names of the streams.
        comm: whose ranks divide each minibatch; None: there is one.
        collate_fn: makes a batch of a dict of `MinibatchData`; without it a batch is a dict of
            tensors.

    >>> from torchmn.cntk.readers import MinibatchSourceFromData
    >>> source = MinibatchSourceFromData({"x": torch.arange(10)})
    >>> dataset = MinibatchDataset(source, 4, comm=comm)
    >>> loader = torch.utils.data.DataLoader(dataset, batch_size=None)
    >>> [batch["x"].tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        source: MinibatchSource,
        minibatch_size: int,
        *,
        input_map: InputMap | None = None,
        comm: Communicator | None = None,
        collate_fn: Collate = tensors,
    ) -> None:
        self.source = source
        self.minibatch_size = minibatch_size
        self._input_map = wanted_streams(input_map or _by_name(source), source.streams)
        self._partition = (1, 0) if comm is None else (comm.size, comm.rank)
        self._collate_fn = collate_fn
        self._num_passes = 0
        """That this process has begun."""
        self._passes = torch.zeros(NUM_SLOTS, dtype=torch.int64, device="cpu").share_memory_()
        """The pass that each worker process began last: a number that is the same in all workers
        of a pass, and above it the number of the sweep after it. See `_sweep_of_pass`."""
        self._forget_passes()

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return self._batches(0, 1)
        sweep = self._sweep_of_pass(worker.seed - worker.id, worker.id)
        if sweep != self.source.sweep or self._num_passes > 1:
            self.source.go_to_sweep(sweep)
        self.source.stop_reading_ahead()
        return self._batches(worker.id, worker.num_workers)

    def _batches(self, first: int, stride: int) -> Iterator[Any]:
        minibatches = self.source.minibatches_of_sweep(
            self.minibatch_size, *self._partition, first=first, stride=stride
        )
        for found in minibatches:
            wanted = self._input_map.items()
            yield self._collate_fn({key: found[stream.name] for key, stream in wanted})

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be the sweep ``epoch``; does nothing if that is in progress."""
        if epoch < 0:
            raise UsageError(f"epoch={epoch} must be 0 or more.")
        if epoch != self.source.sweep:
            self.source.go_to_sweep(epoch)
        self._forget_passes()

    def state_dict(self) -> dict[str, Any]:
        """The state after the minibatches that this process has read. The same on all ranks.

        A process whose DataLoader has workers reads none itself: there, save what `state_after`
        returns.
        """
        return self.source.get_checkpoint_state()

    def state_after(self, num_batches: int) -> dict[str, Any]:
        """The state after ``num_batches``, over one or several passes. Reads nothing.

        They are counted from where this process is. With workers it stays where it was when the
        data set was made, a state was loaded or `set_epoch` was called.
        """
        return self.source.state_after(num_batches, self.minibatch_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the very next sample, also on another number of ranks or workers."""
        self.source.restore_from_checkpoint(state)
        self._forget_passes()

    # ---- passes of worker processes

    def _sweep_of_pass(self, base_seed: int, worker: int) -> int:
        """The sweep of the pass that this worker begins.

        A loader draws a seed for each pass, so it names the pass; workers that are kept for several
        passes count them. Whichever worker comes first takes the next sweep. Each writes one
        number, at once, so that no lock is needed.
        """
        name = hash((base_seed, self._num_passes)) & 0x7FFFFFFF | 1
        self._num_passes += 1
        slots = self._passes.numpy()
        known = [int(slot) for slot in slots]
        sweep = next((s >> 32 for s in known if s & 0x7FFFFFFF == name), None)
        if sweep is None:
            sweep = max(s >> 32 for s in known) + 1
            if self._num_passes == 1:  # a new worker, whose source is where the process left it
                sweep = max(sweep, self.source.sweep + 1)
        slots[worker % NUM_SLOTS] = sweep << 32 | name
        return sweep - 1

    def _forget_passes(self) -> None:
        self._passes.fill_(self.source.sweep << 32)


def _by_name(source: MinibatchSource) -> InputMap:
    return {stream.name: stream for stream in source.stream_infos()}
