"""Samples of a data set that only the root has: each rank receives those of its own shard."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchmn.base.errors import DataError, TorchmnError, UnsupportedError
from torchmn.comm import object_codec
from torchmn.comm.heartbeat import run_on_one_rank
from torchmn.data.permutations import Order
from torchmn.data.sub_dataset import SizedDataset, position_of

if TYPE_CHECKING:
    from torchmn.comm import Communicator


class ReceivedSamples(Dataset[Any]):
    """The samples of a shard, under their indices in the whole data set. Local.

    They are pickled into one tensor, which all workers of a DataLoader share: of a list of samples
    each worker would get a copy. Every read makes a new sample.

    Args:
        length: the number of samples of the whole data set.
        indices: the ascending indices of the samples that are here.
        samples: these samples, in the same order.
    """

    def __init__(self, length: int, indices: Order, samples: Iterable[Any]) -> None:
        self._length = length
        self._indices = indices
        content, ends = bytearray(), [0]
        for sample in samples:
            content += _pickled(sample)
            ends.append(len(content))
        self._ends = np.array(ends, np.int64)
        self._content = torch.from_numpy(np.frombuffer(content, np.uint8))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        position = position_of(index, len(self), "a data set")
        row = int(np.searchsorted(self._indices, position))
        if row == len(self._indices) or self._indices[row] != position:
            raise IndexError(
                f"Sample {index} is not in this rank's shard, which has {len(self._indices)} of "
                f"{len(self)} samples: only those were sent here."
            )
        return pickle.loads(self._content.numpy()[self._ends[row] : self._ends[row + 1]].data)


def receive_samples(
    dataset: SizedDataset[Any] | None,
    comm: Communicator,
    root: int,
    shards: Sequence[Order],
    *,
    length: int,
    max_buf_len: int,
) -> ReceivedSamples:
    """The samples of this rank's shard, which the root reads and sends. *Collective*.

    All ranks synchronize after every ``max_buf_len`` bytes, so the whole may take longer than the
    communicator's time limit.

    Args:
        dataset: the data set on the root; ignored on other ranks.
        comm: the ranks.
        root: the rank that reads.
        shards: for each rank the ascending indices of its samples.
        length: the number of samples of the data set.
        max_buf_len: bytes that are read and sent at a time.

    Raises, on all ranks:
        DataError: the data set raised an exception; the message names the sample.
        UnsupportedError: a sample has a CUDA tensor, or needs pickle without a secret.
    """
    reader = _Reader(dataset, shards, comm.trust, max_buf_len)

    def samples() -> Iterator[Any]:
        is_last = False
        while not is_last:
            is_last = run_on_one_rank(comm, root, reader.read)
            for message in _split(comm.scatter_obj(reader.portion, root)):
                yield _decoded(message, comm.trust)

    return ReceivedSamples(length, shards[comm.rank], samples())


class _Reader:
    """Reads the samples of all shards, a portion at a time. Used on the root."""

    def __init__(
        self,
        dataset: Any,
        shards: Sequence[Order],
        trust: object_codec.Trust,
        max_nbytes: int,
    ) -> None:
        self.portion: list[tuple[list[int], bytes]] = []
        """For each rank the sizes of the messages that `read` has made for it, and these."""
        self._dataset = dataset
        self._shards = shards
        self._trust = trust
        self._max_nbytes = max_nbytes
        self._num_read = 0  # of each shard

    def read(self, heartbeat: Callable[[], None]) -> bool:
        """Read the next portion; return whether it is the last."""
        messages: list[list[bytes]] = [[] for _ in self._shards]
        longest = max(map(len, self._shards))
        nbytes = 0
        while nbytes < self._max_nbytes and self._num_read < longest:
            for own, shard in zip(messages, self._shards, strict=True):
                if self._num_read < len(shard):
                    own.append(self._encoded(int(shard[self._num_read])))
                    nbytes += len(own[-1])
                    heartbeat()
            self._num_read += 1
        self.portion = [([*map(len, own)], b"".join(own)) for own in messages]
        return self._num_read == longest

    def _encoded(self, index: int) -> bytes:
        """A sample as the length of its head (8 bytes), the head, and its tensors."""
        try:
            sample = self._dataset[index]
        except Exception as error:
            raise DataError(
                f"The data set failed at sample {index} of {len(self._dataset)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        try:
            message = object_codec.pack(sample, self._trust)
        except TorchmnError as error:
            raise type(error)(f"Sample {index} of the data set cannot be sent: {error}") from error
        if not all(buffer.is_cpu for buffer in message.buffers):
            raise UnsupportedError(
                f"Sample {index} of the data set has a CUDA tensor. Move its tensors to the CPU, "
                "and each batch to the device."
            )
        tensors = [object_codec.as_bytes(buffer).numpy().tobytes() for buffer in message.buffers]
        return b"".join([struct.pack("<q", len(message.head)), message.head, *tensors])


def _split(portion: tuple[list[int], bytes]) -> Iterator[memoryview]:
    sizes, content = portion
    begin = 0
    for nbytes in sizes:
        yield memoryview(content)[begin : begin + nbytes]
        begin += nbytes


def _decoded(message: memoryview, trust: object_codec.Trust) -> Any:
    (head_length,) = struct.unpack_from("<q", message)
    begin = 8 + head_length
    _, body, tensors = object_codec.unpack_head(bytes(message[8:begin]), torch.device("cpu"))
    for tensor in tensors:
        memory = object_codec.as_bytes(tensor).numpy()
        memory[:] = np.frombuffer(message, np.uint8, count=len(memory), offset=begin)
        begin += len(memory)
    return object_codec.unpack(body, tensors, trust)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays: torch would write an archive for each of them."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_quantized:
            return NotImplemented
        return _tensor, (object_codec.as_bytes(obj).numpy(), obj.dtype, tuple(obj.shape))


def _pickled(sample: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(sample)
    return file.getvalue()


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(memory).view(dtype).view(shape)
