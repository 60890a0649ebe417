"""Minibatches of one data set, equal for any number of ranks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from torchmn.errors import DataError, UnknownNameError, UsageError
from torchmn.readers.deserializer import Deserializer
from torchmn.readers.frames import FrameDeserializer
from torchmn.readers.joining import JoinedDeserializer
from torchmn.readers.minibatch import MinibatchData
from torchmn.readers.randomization import Position, SequenceOrder
from torchmn.readers.read_ahead import Chunks, Deferred, Threads
from torchmn.readers.streams import InputMap, Record, StreamInformation, wanted_streams
from torchmn.readers.truncation import TruncatedOrder
from torchmn.readers.user import (
    UserChunks,
    UserDeserializer,
    UserMinibatchSource,
    UserSourceMinibatches,
)

INFINITELY_REPEAT = 2**64 - 1
"""``max_samples`` or ``max_sweeps`` of a source without end."""
FULL_DATA_SWEEP = 2**64 - 2
"""``max_samples`` of a source that ends after one sweep."""
DEFAULT_WINDOW_IN_CHUNKS = 128


class _Position(Protocol):
    @property
    def sweep(self) -> int: ...

    def state(self) -> Mapping[str, Any]: ...


class _Minibatch(Protocol):
    @property
    def num_samples(self) -> int: ...
    @property
    def sweep_end(self) -> bool: ...
    @property
    def next_position(self) -> _Position: ...
    @property
    def chunk_ids(self) -> set[int]: ...

    def reader(
        self, num_partitions: int, index: int
    ) -> Callable[..., dict[str, MinibatchData]]: ...


class _Order(Protocol):
    def start(self, sweep: int = 0) -> Any: ...

    def reading_at(self, position: Any) -> Position: ...

    def restored(self, state: Mapping[str, Any]) -> Any: ...

    def take(
        self, start: Any, num_samples: int, end_sweep: int | None, crosses_sweeps: bool = True
    ) -> _Minibatch | None: ...


@dataclass(frozen=True)
class _Progress:
    """Where a source is: its next sequence, and the samples of all partitions so far."""

    position: _Position
    num_samples: int = 0


@dataclass(frozen=True)
class _Request:
    minibatch_size: int
    num_partitions: int
    partition: int
    crosses_sweeps: bool = True


@dataclass(frozen=True, eq=False)
class _Planned:
    """A minibatch that is being read."""

    request: _Request
    after: _Progress
    minibatch: _Minibatch
    streams: Future[dict[str, MinibatchData]] | Deferred[dict[str, MinibatchData]]


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

    >>> from torchmn.readers import MinibatchSourceFromData
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
        if max_samples != INFINITELY_REPEAT and max_sweeps != INFINITELY_REPEAT:
            raise UsageError(
                f"max_samples={max_samples} and max_sweeps={max_sweeps} both end the source. Give "
                "only one of them."
            )
        if randomization_window_in_chunks and randomization_window_in_samples:
            raise UsageError(
                f"randomization_window_in_chunks={randomization_window_in_chunks} and "
                f"randomization_window_in_samples={randomization_window_in_samples} are both the "
                "window of the randomization. Give only one of them."
            )
        if frame_mode and truncation_length:
            raise UsageError(
                f"frame_mode=True makes a sequence of each sample and truncation_length="
                f"{truncation_length} cuts sequences. Give only one of them."
            )
        for name, value, lowest in (
            ("max_samples", max_samples, 1),
            ("max_sweeps", max_sweeps, 1),
            ("randomization_window_in_chunks", randomization_window_in_chunks or 0, 0),
            ("randomization_window_in_samples", randomization_window_in_samples, 0),
            ("randomization_seed", randomization_seed, 0),
            ("truncation_length", truncation_length, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise UsageError(f"{name}={value!r} must be an integer of at least {lowest}.")
        self._deserializer = _joined(deserializers)
        if frame_mode:
            self._deserializer = FrameDeserializer(self._deserializer)
        if max_samples == FULL_DATA_SWEEP:
            max_samples, max_sweeps = INFINITELY_REPEAT, 1
        self._max_samples = max_samples
        self._max_sweeps = max_sweeps
        self._seed = randomization_seed
        self._streams = _streams_of(self._deserializer)
        num_chunks = self._deserializer.num_chunks()
        if num_chunks < 1:
            raise DataError(
                f"{self._deserializer!r} has no chunk. A source needs at least one sample: is the "
                "right file given?"
            )
        window = randomization_window_in_chunks
        if not window and not randomization_window_in_samples:
            window = DEFAULT_WINDOW_IN_CHUNKS
        self._infos = self._deserializer.chunk_infos()
        self._window = SequenceOrder(
            self._infos,
            randomization_seed if randomize else None,
            window or 0,
            randomization_window_in_samples,
        )
        self._order: _Order = self._window
        if truncation_length:
            self._order = TruncatedOrder(self._window, truncation_length)
        self._settings = {
            "seed": randomization_seed if randomize else -1,
            "num_chunks": num_chunks,
            "window_in_chunks": window or 0,
            "window_in_samples": randomization_window_in_samples,
            "frame_mode": int(frame_mode),
            "truncation_length": truncation_length,
        }
        self._num_threads = self._threads_wanted(multithreaded_deserializer)
        self._progress = _Progress(self._order.start())
        self.global_num_samples = 0
        """Samples of the last minibatch, over all partitions."""
        self._begin_process()

    # ---- streams

    @property
    def streams(self) -> Record[StreamInformation]:
        """The streams by name: ``source.streams.features``."""
        return self._streams

    def stream_infos(self) -> list[StreamInformation]:
        """The streams in the order of the deserializers."""
        return list(self._streams.values())

    def __getitem__(self, name: str) -> StreamInformation:
        if name not in self._streams:
            raise UnknownNameError("stream", name, self._streams)
        return self._streams[name]

    @property
    def is_infinite(self) -> bool:
        """Whether neither ``max_samples`` nor ``max_sweeps`` ends it."""
        return self._max_samples == INFINITELY_REPEAT and self._max_sweeps == INFINITELY_REPEAT

    # ---- minibatches

    def next_minibatch(
        self,
        minibatch_size_in_samples: int,
        input_map: InputMap | None = None,
        device: torch.device | str | None = None,
        num_data_partitions: int | None = None,
        partition_index: int | None = None,
    ) -> dict[Any, MinibatchData]:
        """This partition's part of the next minibatch; ``{}`` at the end, on all at once.

        A minibatch has whole sequences, at least one, of up to ``minibatch_size_in_samples``
        samples over all partitions. A partition that has none of them gets tensors of 0 rows.

        Args:
            minibatch_size_in_samples: of all partitions together.
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
        request = _request(minibatch_size_in_samples, num_data_partitions, partition_index)
        wanted = wanted_streams(input_map, self._streams)
        return self._next(request, wanted, device)

    def _next(
        self,
        request: _Request,
        wanted: Mapping[Any, StreamInformation],
        device: torch.device | str | None = None,
    ) -> dict[Any, MinibatchData]:
        self._notice_fork()
        if self._ahead and self._ahead[0].request != request:
            self._forget_ahead()
        self._plan_ahead(request, at_least=max(self._num_ahead, 1))
        if not self._ahead:
            self.global_num_samples = 0
            return {}
        planned = self._ahead[0]
        try:
            streams = planned.streams.result()
            found = {key: streams[stream.name].to(device) for key, stream in wanted.items()}
        except BaseException:
            self._forget_ahead()
            raise
        with suppress(Exception):  # of a later minibatch, which raises it when it is asked for
            self._plan_ahead(request, at_least=self._num_ahead and self._num_ahead + 1)
        self.global_num_samples = planned.minibatch.num_samples
        self._progress = planned.after
        self._ahead.popleft()  # last: an interrupt before it loses no minibatch
        return found

    def _plan_ahead(self, request: _Request, at_least: int) -> None:
        """Begin to read minibatches until there are ``at_least`` some that were begun."""
        while len(self._ahead) < at_least:
            before = self._ahead[-1].after if self._ahead else self._progress
            minibatch = self._take(before, request)
            if minibatch is None:
                return
            after = _after(before, minibatch)
            reader = minibatch.reader(request.num_partitions, request.partition)
            self._ahead.append(_Planned(request, after, minibatch, self._start_reading(reader)))
            self._move_window(self._order.reading_at(before.position))

    def _take(self, progress: _Progress, request: _Request) -> _Minibatch | None:
        left = self._max_samples - progress.num_samples
        if left <= 0 or progress.position.sweep >= self._max_sweeps:
            return None
        end_sweep = None if self._max_sweeps == INFINITELY_REPEAT else self._max_sweeps
        size = min(request.minibatch_size, left)
        return self._order.take(progress.position, size, end_sweep, request.crosses_sweeps)

    def _start_reading(
        self, reader: Callable[..., dict[str, MinibatchData]]
    ) -> Future[dict[str, MinibatchData]] | Deferred[dict[str, MinibatchData]]:
        read = partial(reader, self.stream_infos(), self._chunks, self._seed)
        return self._threads.run(read) if self._num_ahead else Deferred(read)

    def _move_window(self, position: Position) -> None:
        """Drop the chunks of blocks that are done, and read those of the next block in time."""
        if self._window.keeps_all:
            return
        current = self._window.chunk_ids(position)
        used = {chunk for planned in self._ahead for chunk in planned.minibatch.chunk_ids}
        used.update(current)
        following = self._window.next_block(position)
        ahead: tuple[int, ...] = ()
        if following.sweep != self._max_sweeps and len(used) == len(current):
            ahead = self._window.chunk_ids(following)
            block = self._window.block(position)
            ahead = ahead[: -(-len(ahead) * position.sequence // max(len(block), 1))]
        self._chunks.keep_only(used | set(ahead))
        if self._num_ahead:
            for chunk_id in sorted(set(ahead) - self._chunks_ahead):
                self._loader.run(partial(self._chunks.read_ahead, chunk_id))
            self._chunks_ahead.clear()
            self._chunks_ahead.update(ahead)

    def _forget_ahead(self) -> None:
        self._notice_fork()
        for planned in self._ahead:
            planned.streams.cancel()
        self._ahead.clear()

    def minibatches_of_sweep(
        self,
        minibatch_size: int,
        num_data_partitions: int = 1,
        partition_index: int = 0,
        *,
        first: int = 0,
        stride: int = 1,
    ) -> Iterator[dict[str, MinibatchData]]:
        """This partition's parts of the minibatches to the end of the sweep, by stream name.

        None goes over the end. With ``stride`` n only every n-th is read, beginning with number
        ``first``; the others are passed over.
        """
        request = _request(minibatch_size, num_data_partitions, partition_index)
        request = replace(request, crosses_sweeps=False)
        sweep, number = self.sweep, 0
        while self.sweep == sweep:
            if number % stride == first:
                found = self._next(request, self._streams)
                if not found:
                    return
                yield found
            elif not self._pass_over(request):
                return
            number += 1

    def _pass_over(self, request: _Request) -> bool:
        self._forget_ahead()
        minibatch = self._take(self._progress, request)
        if minibatch is not None:
            self._progress = _after(self._progress, minibatch)
        return minibatch is not None

    # ---- sweeps

    @property
    def sweep(self) -> int:
        """Sweeps done."""
        return self._progress.position.sweep

    @property
    def sweep_detail(self) -> float:
        """Sweeps done, with the part of the current one, as its blocks of chunks are done."""
        return self._window.fraction(self._order.reading_at(self._progress.position))

    @property
    def num_samples_of_sweep(self) -> int | None:
        """Samples in a sweep; None where that is not known without reading the data."""
        infos = self._infos
        known = isinstance(infos, (list, tuple))
        return sum(info.num_samples for info in infos) if known else None

    def go_to_sweep(self, sweep: int) -> None:
        """Continue with the first sample of a sweep, which counts from 0."""
        self._forget_ahead()
        num_samples = 0
        if self._max_samples != INFINITELY_REPEAT:
            num_samples = sweep * sum(info.num_samples for info in self._infos)
        self._progress = _Progress(self._order.start(sweep), num_samples)

    # ---- state

    @property
    def current_position(self) -> int:
        """Samples so far, over all partitions."""
        return self._progress.num_samples

    def get_checkpoint_state(self) -> dict[str, Any]:
        """Numbers from which `restore_from_checkpoint` resumes with the very next sample.

        The same on all ranks, and valid for any number of partitions and any minibatch size.
        """
        return self._state(self._progress)

    def state_dict(self) -> dict[str, Any]:
        """`get_checkpoint_state`, by the name that a checkpointer calls."""
        return self.get_checkpoint_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`restore_from_checkpoint`, by the name that a checkpointer calls."""
        self.restore_from_checkpoint(state)

    def state_after(self, num_minibatches: int, minibatch_size: int) -> dict[str, Any]:
        """The state after the next minibatches that do not go over the end of a sweep.

        For what reads ahead of the training in other processes. Nothing is read.
        """
        progress = self._progress
        request = replace(_request(minibatch_size, None, None), crosses_sweeps=False)
        for _ in range(num_minibatches):
            minibatch = self._take(progress, request)
            if minibatch is None:
                break
            progress = _after(progress, minibatch)
        return self._state(progress)

    def _state(self, progress: _Progress) -> dict[str, Any]:
        return {
            **progress.position.state(),
            "num_samples": progress.num_samples,
            **self._settings,
        }

    def restore_from_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Raises UsageError: it is not a state of a source with this data, seed and window.
        """
        missing = [name for name in self.get_checkpoint_state() if name not in state]
        if missing:
            raise UsageError(
                f"The state of a MinibatchSource lacks {', '.join(missing)}. It has "
                f"{', '.join(map(str, state)) or 'nothing'}."
            )
        for name, value in self._settings.items():
            if int(state[name]) != value:
                raise UsageError(
                    f"The state was saved with {name}={state[name]} and the source has {value}, "
                    "so its order of samples is another. Make the source as it was when the state "
                    "was saved."
                )
        position = self._order.restored(state)
        self._forget_ahead()
        self._progress = _Progress(position, int(state["num_samples"]))

    # ---- threads

    def stop_reading_ahead(self) -> None:
        """Read each minibatch when it is asked for, where something else reads ahead."""
        self.close()
        self._num_threads = self._num_ahead = 0

    def close(self) -> None:
        """End the threads that read ahead, and drop what they have read. A later call resumes."""
        self._forget_ahead()
        self._threads.close()
        self._loader.close()
        self._chunks.keep_only(())

    def _threads_wanted(self, multithreaded: bool | None) -> int:
        if getattr(self._deserializer, "is_in_memory", False):
            return 0
        if multithreaded is None:
            multithreaded = bool(getattr(self._deserializer, "is_parallel", False))
        # Launchers set torch's number of threads to this rank's share of the cores.
        return max(torch.get_num_threads(), 2) if multithreaded else 1

    def _notice_fork(self) -> None:
        """Leave what belongs to the threads of the process that this one was forked from."""
        if os.getpid() != self._process:
            self._begin_process()

    def _begin_process(self) -> None:
        """What a process has for itself: threads do not survive a fork."""
        self._process = os.getpid()
        self._ahead: deque[_Planned] = deque()
        self._chunks_ahead: set[int] = set()
        self._num_ahead = self._num_threads and self._num_threads + 1
        self._chunks = Chunks(self._deserializer.get_chunk, repr(self._deserializer))
        self._threads = Threads(self._num_threads, "torchmn-decode")
        self._loader = Threads(1, "torchmn-read")

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_ahead", "_chunks_ahead", "_chunks", "_threads", "_loader", "_process"}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_process()


def _after(before: _Progress, minibatch: _Minibatch) -> _Progress:
    return _Progress(minibatch.next_position, before.num_samples + minibatch.num_samples)


def as_minibatch_source(
    source: MinibatchSource | UserMinibatchSource,
) -> MinibatchSource | UserSourceMinibatches:
    """A source with the interface of `MinibatchSource`: itself, or made of a user's. Local.

    Raises UsageError: it is no source.
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


def _request(size: int, num_partitions: int | None, partition: int | None) -> _Request:
    num_partitions = 1 if num_partitions is None else num_partitions
    partition = 0 if partition is None else partition
    if size < 1:
        raise UsageError(
            f"minibatch_size_in_samples={size} must be at least 1: the samples of all partitions."
        )
    if not 0 <= partition < num_partitions:
        raise UsageError(
            f"partition_index={partition} must be from 0 to num_data_partitions - 1 = "
            f"{num_partitions - 1}. Give num_data_partitions=comm.size, partition_index=comm.rank."
        )
    return _Request(int(size), int(num_partitions), int(partition))


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
