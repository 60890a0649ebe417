"""A minibatch source as the iterator of an updater."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch

from torchmn.base.errors import UnsupportedError
from torchmn.cntk.readers.deserializer import InputMap
from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.cntk.readers.minibatch_source import MinibatchSource
from torchmn.comm import Communicator

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
        comm: the ranks that divide each minibatch; None for one process.
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


def _by_name(source: MinibatchSource) -> InputMap:
    return {stream.name: stream for stream in source.stream_infos()}
