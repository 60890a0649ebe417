from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from torchmn.cntk.readers import (
    MinibatchData,
    MinibatchSource,
    StreamInformation,
    UserDeserializer,
    UserMinibatchSource,
    as_minibatch_source,
)
from torchmn.errors import DataError, UnsupportedError


class Chunks(UserDeserializer):
    """CNTK's example: chunks of a table."""

    def __init__(self, chunks: list[Any], **stream: Any) -> None:
        self.chunks, self.stream = chunks, {"shape": (2,), **stream}
        self.num_reads = 0

    def stream_infos(self) -> list[StreamInformation]:
        return [StreamInformation("x", 0, **self.stream)]

    def num_chunks(self) -> int:
        return len(self.chunks)

    def get_chunk(self, chunk_id: int) -> Mapping[str, Any]:
        self.num_reads += 1
        return self.chunks[chunk_id]


def first(*chunks: Any, **stream: Any) -> MinibatchData:
    source = MinibatchSource(Chunks(list(chunks), **stream), randomize=False)
    try:
        return source.next_minibatch(100, {"x": "x"})["x"]
    finally:
        source.close()


def test_arrays_and_lists_of_sequences() -> None:
    assert first({"x": np.ones((3, 2))}).data.dtype == torch.float32
    sequences = first({"x": [np.ones((2, 2)), np.zeros((3, 2))]}, shape=(2,))
    assert sequences.lengths is not None
    assert sequences.num_sequences >= 2
    labels = first({"x": np.array([1.0, 2.0])}, shape=(), dtype=np.int64)
    assert labels.data.dtype == torch.int64


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ([1, 2], "Chunk 0 of Chunks: get_chunk.. returned a list. It must return a dict"),
        ({"y": np.ones((1, 2))}, "returned no x, which stream_infos.. lists. It returned y"),
        ({"x": "text"}, "Chunk 0 of Chunks: The stream 'x' is a str"),
        ({"x": np.ones((3, 4))}, r"tensor \(3, 4\).*should be \(3, 2\)"),
    ],
)
def test_wrong_chunks(chunk: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        first(chunk)


def test_a_chunk_that_changes_is_refused() -> None:
    chunks = Chunks([{"x": np.ones((n, 2))} for n in (3, 4, 5, 6, 7, 8)])
    source = MinibatchSource(chunks, randomization_window_in_chunks=2)
    assert len(list(source.minibatches_of_sweep(10))) >= 3
    chunks.chunks = [{"x": np.ones((9, 2))} for _ in chunks.chunks]
    with pytest.raises(DataError, match="now has 9 sequences .* A chunk must be the same"):
        list(source.minibatches_of_sweep(10))
    source.close()


class Endless(UserMinibatchSource):
    """Each rank counts by itself."""

    def __init__(self) -> None:
        self.count = 0

    def stream_infos(self) -> list[StreamInformation]:
        return [StreamInformation("x", shape=(1,))]

    def next_minibatch(
        self, num_samples: int, number_of_workers: int = 1, worker_rank: int = 0, device: Any = None
    ) -> Mapping[StreamInformation, MinibatchData]:
        self.count += 1
        num = num_samples // number_of_workers
        data = torch.full((num, 1), float(self.count + worker_rank))
        return {self.stream_infos()[0]: MinibatchData(data, num, num, False)}

    def is_infinite(self) -> bool:
        return True


class WithState(Endless):
    def get_checkpoint_state(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def restore_from_checkpoint(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_a_source_of_a_user() -> None:
    source = as_minibatch_source(WithState())
    assert source.is_infinite
    assert source.streams.x == source["x"]
    found = source.next_minibatch(8, {"in": source.streams.x}, None, 2, 1)
    assert found["in"].data.tolist() == [[2.0]] * 4
    state = source.get_checkpoint_state()
    other = as_minibatch_source(WithState())
    other.restore_from_checkpoint(state)
    assert torch.equal(other.next_minibatch(2)[other["x"]].data, torch.full((2, 1), 2.0))
    own = MinibatchSource(Chunks([{"x": np.ones((3, 2))}]))
    assert as_minibatch_source(own) is own


def test_a_state_that_is_not_restored_is_refused() -> None:
    source = as_minibatch_source(Endless())
    source.restore_from_checkpoint({})
    with pytest.raises(UnsupportedError, match="Endless has a state .count."):
        source.restore_from_checkpoint({"count": 1})
