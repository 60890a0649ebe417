"""Base classes for deserializers and minibatch sources of your own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchmn.base.errors import DataError, UnsupportedError
from torchmn.cntk.readers.arrays import ArrayChunk
from torchmn.cntk.readers.deserializer import (
    Chunk,
    ChunkInfo,
    InfosOnDemand,
    InputMap,
    Record,
    StreamInformation,
    wanted_streams,
)
from torchmn.cntk.readers.files import ProcessLock
from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.cntk.readers.read_ahead import named_error


class UserDeserializer(ABC):
    """Base class, as in CNTK, for reading a data set of your own in chunks. Local.

    A chunk is returned as arrays by stream name, so there is no index: what a chunk has is known
    when it is read. Sources read chunks in one thread, one at a time. For a large data set with an
    index, and sequences that are decoded when they are needed, write a `Deserializer`.

    Example:
        >>> class Numbers(UserDeserializer):
        ...     def stream_infos(self):
        ...         return [StreamInformation("x", shape=(1,))]
        ...     def num_chunks(self):
        ...         return 2
        ...     def get_chunk(self, chunk_id):
        ...         return {"x": torch.full((3, 1), float(chunk_id))}
        >>> source = torchmn.cntk.readers.MinibatchSource(Numbers(), randomize=False)
        >>> source.next_minibatch(4, {"x": source.streams.x})["x"].data.flatten().tolist()
        [0.0, 0.0, 0.0, 1.0]
    """

    @abstractmethod
    def stream_infos(self) -> list[StreamInformation]:
        """The streams, each with a name of its own."""

    @abstractmethod
    def num_chunks(self) -> int:
        """The number of chunks."""

    @abstractmethod
    def get_chunk(self, chunk_id: int) -> Mapping[str, Any]:
        """Read a chunk: by stream name what `MinibatchSourceFromData` accepts."""


class UserMinibatchSource(ABC):
    """Base class, as in CNTK, for minibatches of your own. Each rank calls its own.

    `as_minibatch_source` gives it the interface of other sources; training sessions do that.

    >>> class Ones(torchmn.cntk.readers.UserMinibatchSource):
    ...     def stream_infos(self):
    ...         return [torchmn.cntk.readers.StreamInformation("x", 0, "dense", np.float32, (2,))]
    ...     def next_minibatch(self, num_samples, number_of_workers=1, worker_rank=0, device=None):
    ...         data = torch.ones(num_samples, 2)
    ...         x = self.stream_infos()[0]
    ...         return {x: torchmn.cntk.MinibatchData(data, num_samples, num_samples, False)}
    >>> [data] = Ones().next_minibatch(3).values()
    >>> data.num_samples
    3
    """

    @abstractmethod
    def stream_infos(self) -> list[StreamInformation]:
        """The streams, each with a name of its own."""

    @abstractmethod
    def next_minibatch(
        self,
        num_samples: int,
        number_of_workers: int = 1,
        worker_rank: int = 0,
        device: torch.device | str | None = None,
    ) -> Mapping[StreamInformation, MinibatchData]:
        """This rank's part of the next minibatch of ``num_samples`` over all ranks; ``{}`` at the
        end of this rank's data."""

    def get_checkpoint_state(self) -> Mapping[str, Any]:
        """Numbers from which `restore_from_checkpoint` resumes; the same on all ranks."""
        return {}

    def restore_from_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state. Raises UnsupportedError: this method is not overridden."""
        if state:
            raise UnsupportedError(
                f"{type(self).__name__} has a state ({', '.join(map(str, state))}) but no "
                "restore_from_checkpoint(). Override both, or neither."
            )

    def is_infinite(self) -> bool:
        """Whether it never ends."""
        return False

    @property
    def streams(self) -> Record[StreamInformation]:
        """The streams by name."""
        return Record(**{info.name: info for info in self.stream_infos()})


class UserSourceMinibatches:
    """A `UserMinibatchSource` with the interface of a `MinibatchSource`. Local."""

    def __init__(self, user: UserMinibatchSource) -> None:
        self._user = user
        self.streams = user.streams

    def stream_infos(self) -> list[StreamInformation]:
        """See `MinibatchSource`."""
        return self._user.stream_infos()

    def __getitem__(self, name: str) -> StreamInformation:
        return self.streams[name]

    @property
    def is_infinite(self) -> bool:
        """See `MinibatchSource`."""
        return self._user.is_infinite()

    def next_minibatch(
        self,
        minibatch_size_in_samples: int,
        input_map: InputMap | None = None,
        device: torch.device | str | None = None,
        num_data_partitions: int | None = None,
        partition_index: int | None = None,
    ) -> dict[Any, MinibatchData]:
        """See `MinibatchSource`."""
        found = self._user.next_minibatch(
            minibatch_size_in_samples, num_data_partitions or 1, partition_index or 0, device
        )
        by_name = {stream.name: value for stream, value in found.items()}
        wanted = wanted_streams(input_map, self.streams)
        return {key: by_name[stream.name].to(device) for key, stream in wanted.items() if by_name}

    def get_checkpoint_state(self) -> Mapping[str, Any]:
        """See `MinibatchSource`."""
        return self._user.get_checkpoint_state()

    def restore_from_checkpoint(self, state: Mapping[str, Any]) -> None:
        """See `MinibatchSource`."""
        self._user.restore_from_checkpoint(state)


class UserChunks:
    """A `UserDeserializer` with the interface of a `Deserializer`. Local.

    The `ChunkInfo` of a chunk is made when the chunk is read. If it is asked for earlier, the chunk
    is read and kept until `get_chunk` takes it.
    """

    def __init__(self, user: UserDeserializer) -> None:
        self._user = user
        self._streams = user.stream_infos()
        self._infos: dict[int, ChunkInfo] = {}
        self._kept: dict[int, ArrayChunk] = {}
        self._lock = ProcessLock()

    def stream_infos(self) -> list[StreamInformation]:
        """See `Deserializer`."""
        return self._streams

    def num_chunks(self) -> int:
        """See `Deserializer`."""
        return self._user.num_chunks()

    def chunk_infos(self) -> Sequence[ChunkInfo]:
        """See `Deserializer`."""
        return InfosOnDemand(self.num_chunks, self.info)

    def get_chunk(self, chunk_id: int) -> Chunk:
        """See `Deserializer`."""
        # A user's `get_chunk` need not be safe to call from several threads.
        with self._lock:
            return self._kept.pop(chunk_id, None) or self._read(chunk_id)

    def info(self, chunk_id: int) -> ChunkInfo:
        """The `ChunkInfo` of a chunk, which is read if it has not been before."""
        with self._lock:
            if chunk_id not in self._infos:
                self._kept[chunk_id] = self._read(chunk_id)
            return self._infos[chunk_id]

    def _read(self, chunk_id: int) -> ArrayChunk:
        where = f"Chunk {chunk_id} of {self!r}"
        try:
            found = self._user.get_chunk(chunk_id)
        except Exception as error:
            raise named_error(error, where) from error
        if not isinstance(found, Mapping):
            raise DataError(
                f"{where}: get_chunk() returned a {type(found).__name__}. It must return a dict of "
                "arrays by stream name."
            )
        missing = [info.name for info in self._streams if info.name not in found]
        if missing:
            raise DataError(
                f"{where}: get_chunk() returned no {', '.join(missing)}, which stream_infos() "
                f"lists. It returned {', '.join(map(str, found)) or 'nothing'}."
            )
        try:
            chunk = ArrayChunk(
                {info.name: found[info.name] for info in self._streams}, self._streams
            )
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        info = chunk.info(next((s.name for s in self._streams if s.defines_mb_size), None))
        before = self._infos.setdefault(chunk_id, info)
        if before.num_sequences != info.num_sequences or before.num_samples != info.num_samples:
            raise DataError(
                f"{where} now has {info.num_sequences} sequences of {info.num_samples} samples, "
                f"and had {before.num_sequences} of {before.num_samples} when it was read before. "
                "A chunk must be the same each time."
            )
        return chunk

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_kept": {}}

    def __repr__(self) -> str:
        user = self._user
        return type(user).__name__ if type(user).__repr__ is object.__repr__ else repr(user)
