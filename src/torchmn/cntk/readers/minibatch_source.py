"""Minibatches of one data set, equal for any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchmn.base.errors import DataError, UsageError, raise_if_no_count, raise_if_unknown
from torchmn.cntk.readers.arrays import ArrayChunk
from torchmn.cntk.readers.deserializer import (
    Deserializer,
    InputMap,
    Record,
    StreamInformation,
    has_one_sample,
    wanted_streams,
)
from torchmn.cntk.readers.frames import FrameDeserializer
from torchmn.cntk.readers.joining import JoinedDeserializer
from torchmn.cntk.readers.minibatch import MinibatchData, as_in_other_parts
from torchmn.cntk.readers.minibatch_plan import INFINITELY_REPEAT, MinibatchPlan, Request
from torchmn.cntk.readers.read_ahead import MinibatchesAhead
from torchmn.cntk.readers.user import (
    UserChunks,
    UserDeserializer,
    UserMinibatchSource,
    UserSourceMinibatches,
)


class MinibatchSource:
    """Minibatches from one or several deserializers, shuffled in a window. Local.

    All ranks make the same source and ask for the same minibatches, each for its own partition:
    the sequences of a minibatch, and their order, are the same for any number of partitions. The
    size of a minibatch is that of all partitions together. Nothing is communicated.

    A sweep is one pass over the data. Sweep s has the order of (seed, s). A minibatch may go over
    the end of a sweep; then ``sweep_end`` is True. Threads read ahead what the last call suggests.

    Args:
        deserializers: one, or several whose streams are joined.
        max_samples: end after this number of samples over all partitions; ``FULL_DATA_SWEEP``
            means one sweep.
        max_sweeps: end after this number of sweeps.
        randomization_window_in_chunks: chunks that are in memory at once, 128 if no window is
            given: one half is shuffled while the other half is read.
        randomization_window_in_samples: the same in samples.
        randomization_seed: 0 or more; the same on all ranks.
        multithreaded_deserializer: decode in several threads; None: if the deserializer takes long
            (images); False: in one.
        frame_mode: each sample of a sequence is a sequence of its own.
        truncation_length: cut sequences into pieces of this length, for truncated backpropagation
            through time; 0 keeps them whole.
        randomize: False keeps the order of the data.

    Raises:
        UsageError: arguments contradict each other or are out of range.
        DataError: there is no data, or deserializers do not fit together.

    >>> from torchmn.cntk.readers import MinibatchSourceFromData
    >>> source = MinibatchSourceFromData({"features": torch.ones(100, 3)}, max_sweeps=2)
    >>> minibatch = source.next_minibatch(64, {"x": source.streams.features},
    ...                                   num_data_partitions=comm.size, partition_index=comm.rank)
    >>> minibatch["x"].data.shape
    torch.Size([64, 3])
    """

    def __init__(
        self,
        deserializers: Deserializer | UserDeserializer | Sequence[Deserializer | UserDeserializer],
        max_samples: int = INFINITELY_REPEAT,
        max_sweeps: int = INFINITELY_REPEAT,
        randomization_window_in_chunks: int | None = None,
        randomization_window_in_samples: int = 0,
        randomization_seed: int = 0,
        multithreaded_deserializer: bool | None = None,
        frame_mode: bool = False,
        truncation_length: int = 0,
        randomize: bool = True,
    ) -> None:
        ends = {"max_samples": max_samples, "max_sweeps": max_sweeps}
        windows = {
            "randomization_window_in_chunks": randomization_window_in_chunks or 0,
            "randomization_window_in_samples": randomization_window_in_samples,
        }
        others = {"randomization_seed": randomization_seed, "truncation_length": truncation_length}
        for name, value in {**ends, **windows, **others}.items():
            raise_if_no_count(name, value, "an integer", least=int(name in ends))
        pieces = {"frame_mode": frame_mode, "truncation_length": truncation_length}
        for pair, absent in ((ends, INFINITELY_REPEAT), (windows, 0), (pieces, 0)):
            if absent not in pair.values():
                given = " and ".join(f"{name}={value}" for name, value in pair.items())
                raise UsageError(f"{given} exclude each other. Give only one of them.")
        self._deserializer = _joined(deserializers)
        if frame_mode:
            self._deserializer = FrameDeserializer(self._deserializer)
        self._streams = _streams_of(self._deserializer)
        if self._deserializer.num_chunks() < 1:
            raise DataError(
                f"{self._deserializer!r} has no chunk. A source needs at least one sample: is the "
                "right file given?"
            )
        self._plan = MinibatchPlan(
            self._deserializer.chunk_infos(),
            max_samples=max_samples,
            max_sweeps=max_sweeps,
            window_in_chunks=randomization_window_in_chunks or 0,
            window_in_samples=randomization_window_in_samples,
            seed=randomization_seed if randomize else None,
            frame_mode=frame_mode,
            truncation_length=truncation_length,
        )
        self._ahead = MinibatchesAhead(
            self._plan,
            self._deserializer,
            self.stream_infos(),
            randomization_seed,
            _num_threads(self._deserializer, multithreaded_deserializer),
        )
        self._has_one_sample = {} if truncation_length else has_one_sample(self._deserializer)
        self._progress = self._plan.start()
        self.global_num_samples = 0
        """Samples of the last minibatch, over all partitions."""

    # ---- streams

    @property
    def streams(self) -> Record[StreamInformation]:
        """The streams by name: ``source.streams.features``."""
        return self._streams

    def stream_infos(self) -> list[StreamInformation]:
        """The streams in the order of the deserializers."""
        return list(self._streams.values())

    def __getitem__(self, name: str) -> StreamInformation:
        raise_if_unknown("stream", name, self._streams)
        return self._streams[name]

    @property
    def is_infinite(self) -> bool:
        """Whether neither ``max_samples`` nor ``max_sweeps`` ends the source."""
        return self._plan.is_infinite

    # ---- minibatches

    def next_minibatch(
        self,
        minibatch_size_in_samples: int,
        input_map: InputMap | None = None,
        device: torch.device | str | None = None,
        num_data_partitions: int | None = None,
        partition_index: int | None = None,
    ) -> dict[Any, MinibatchData]:
        """This partition's part of the next minibatch; ``{}`` at the end, for all partitions.

        A minibatch has whole sequences, at least one, of up to ``minibatch_size_in_samples``
        samples over all partitions. A partition that has none of them gets tensors of 0 rows.

        Args:
            minibatch_size_in_samples: the most samples over all partitions.
            input_map: a stream, or its name, for each key of the result; None: all streams, with
                their `StreamInformation` as keys.
            device: where the samples go.
            num_data_partitions: the number of ranks; 1 if None.
            partition_index: this rank; 0 if None.

        Raises:
            UsageError: an argument is out of range.
            DataError: a file cannot be read. The next call returns the same minibatch, as it does
                after any error, such as too little memory on the device.
        """
        request = Request.checked(minibatch_size_in_samples, num_data_partitions, partition_index)
        wanted = wanted_streams(input_map, self._streams)
        return self._next(request, wanted, device)

    def _next(
        self,
        request: Request,
        wanted: Mapping[Any, StreamInformation],
        device: torch.device | str | None = None,
    ) -> dict[Any, MinibatchData]:
        first = self._ahead.first(self._progress, request)
        if first is None:
            self.global_num_samples = 0
            return {}
        try:
            streams = as_in_other_parts(first.streams.result(), self._has_one_sample)
            found = {key: streams[stream.name].to(device) for key, stream in wanted.items()}
        except BaseException:
            self._ahead.forget()  # so that the next call reads this minibatch again
            raise
        self._ahead.begin_another(self._progress, request)
        self.global_num_samples = first.minibatch.num_samples
        self._progress = first.after
        self._ahead.drop_first()  # last: an interrupt before it loses no minibatch
        return found

    def minibatches_of_sweep(
        self, minibatch_size: int, num_data_partitions: int = 1, partition_index: int = 0
    ) -> Iterator[dict[str, MinibatchData]]:
        """This partition's parts of the minibatches to the end of the sweep, by stream name.

        No minibatch crosses the end of the sweep.
        """
        request = Request.checked(minibatch_size, num_data_partitions, partition_index)
        request = replace(request, crosses_sweeps=False)
        sweep = self.sweep
        while self.sweep == sweep and (found := self._next(request, self._streams)):
            yield found

    # ---- sweeps

    @property
    def sweep(self) -> int:
        """Number of complete sweeps."""
        return self._progress.position.sweep

    @property
    def sweep_detail(self) -> float:
        """Sweeps done, with the fraction of the current one, counted in blocks of chunks."""
        return self._plan.fraction(self._progress)

    @property
    def num_samples_of_sweep(self) -> int | None:
        """Samples in a sweep; None where that is not known without reading the data."""
        return self._plan.num_samples_of_sweep

    def go_to_sweep(self, sweep: int) -> None:
        """Continue with the first sample of a sweep, which counts from 0."""
        self._ahead.forget()
        self._progress = self._plan.start(sweep)

    # ---- state

    @property
    def current_position(self) -> int:
        """Samples so far, over all partitions."""
        return self._progress.num_samples

    def get_checkpoint_state(self) -> dict[str, Any]:
        """Numbers from which `restore_from_checkpoint` resumes with the very next sample.

        The same on all ranks, and valid for any number of partitions and any minibatch size.
        """
        return self._plan.state(self._progress)

    def state_dict(self) -> dict[str, Any]:
        """`get_checkpoint_state` under the name that a checkpointer calls."""
        return self.get_checkpoint_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`restore_from_checkpoint` under the name that a checkpointer calls."""
        self.restore_from_checkpoint(state)

    def restore_from_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Raises UsageError: it is not a state of a source with this data, seed and window.
        """
        progress = self._plan.restored(state)
        self._ahead.forget()
        self._progress = progress

    # ---- threads

    def close(self) -> None:
        """End the threads that read ahead, and drop what they have read. A later call resumes."""
        self._ahead.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ahead": copy.copy(self._ahead)}


class MinibatchSourceFromData(MinibatchSource):
    """Minibatches of data in memory, in order unless ``randomize`` is True. Local.

    Args:
        data_streams: by stream name a NumPy array or tensor ``(num_sequences, *shape)`` of
            sequences of one sample, a list of arrays ``(length, *shape)``, one for each sequence,
            or a sparse matrix (SciPy's or ``torch.sparse_csr``) of one row for each sequence. A
            tuple ``(value, type)``, as in CNTK, is its value. float64 becomes float32; integers
            stay integers, as labels for PyTorch's losses.
        max_samples: see `MinibatchSource`.
        max_sweeps: see `MinibatchSource`.
        randomize: draw a new order for each sweep.
        randomization_seed: 0 or more; the same on all ranks.

    Raises UsageError: streams have different numbers of sequences, or a value is of no such type.

    >>> source = MinibatchSourceFromData({"x": torch.rand(100, 3), "y": torch.zeros(100, 1)})
    >>> source.next_minibatch(10, {"x": "x"})["x"].data.shape
    torch.Size([10, 3])
    """

    def __init__(
        self,
        data_streams: Mapping[str, Any],
        max_samples: int = INFINITELY_REPEAT,
        max_sweeps: int = INFINITELY_REPEAT,
        *,
        randomize: bool = False,
        randomization_seed: int = 0,
    ) -> None:
        super().__init__(
            ArrayChunk(data_streams),
            max_samples,
            max_sweeps,
            randomize=randomize,
            randomization_seed=randomization_seed,
        )


def as_minibatch_source(
    source: MinibatchSource | UserMinibatchSource,
) -> MinibatchSource | UserSourceMinibatches:
    """A source with the interface of `MinibatchSource`: itself, or made of a user's. Local.

    Raises UsageError: ``source`` is of neither class.

    Example:
        >>> from torchmn.cntk.readers import MinibatchSourceFromData
        >>> source = MinibatchSourceFromData({"x": torch.arange(4)})
        >>> as_minibatch_source(source) is source
        True
    """
    if isinstance(source, UserMinibatchSource):
        return UserSourceMinibatches(source)
    if not hasattr(source, "next_minibatch"):
        raise UsageError(
            f"The minibatch source is of type {type(source).__name__}. It must be a "
            "MinibatchSource or a UserMinibatchSource. Arrays and tensors become one by "
            "MinibatchSourceFromData({'features': x, 'labels': y})."
        )
    return source


def _joined(
    deserializers: Deserializer | UserDeserializer | Sequence[Deserializer | UserDeserializer],
) -> Deserializer:
    parts = deserializers if isinstance(deserializers, Sequence) else [deserializers]
    if not parts:
        raise UsageError("A source needs at least one deserializer.")
    known = [UserChunks(part) if isinstance(part, UserDeserializer) else part for part in parts]
    return known[0] if len(known) == 1 else JoinedDeserializer(known)


def _num_threads(deserializer: Deserializer, multithreaded: bool | None) -> int:
    if getattr(deserializer, "is_in_memory", False):
        return 0
    if multithreaded is None:
        multithreaded = bool(getattr(deserializer, "is_parallel", False))
    # Launchers set torch's number of threads to this rank's share of the cores.
    return max(torch.get_num_threads(), 2) if multithreaded else 1


def _streams_of(deserializer: Deserializer) -> Record[StreamInformation]:
    infos = deserializer.stream_infos()
    names = [info.name for info in infos]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(
            f"Several streams have the name {', '.join(doubled)}. Give each stream a name of its "
            "own in StreamDefs."
        )
    return Record(**{info.name: info for info in infos})
