import pickle
from typing import Any

import numpy as np
import pytest
import torch

from torchmn.cntk.readers import ChunkInfo, MinibatchSource, StreamInformation
from torchmn.errors import DataError, UsageError


class Keyed:
    """One value for each key, in chunks of ``chunk_size``."""

    def __init__(
        self, name: str, keys: list[Any], chunk_size: int, *, has_keys: bool = True, **stream: Any
    ) -> None:
        self.name, self.keys, self.chunk_size, self.has_keys = name, keys, chunk_size, has_keys
        self.stream = stream
        self.num_reads = 0

    def stream_infos(self) -> list[StreamInformation]:
        return [StreamInformation(self.name, shape=(1,), **self.stream)]

    def num_chunks(self) -> int:
        return len(self.chunk_infos())

    def chunk_infos(self) -> list[ChunkInfo]:
        parts = [self._part(n) for n in range(-(-len(self.keys) // self.chunk_size))]
        return [
            ChunkInfo(
                num_sequences=len(part), num_samples=len(part), keys=part if self.has_keys else None
            )
            for part in parts
        ]

    def _part(self, chunk_id: int) -> list[Any]:
        return self.keys[chunk_id * self.chunk_size : (chunk_id + 1) * self.chunk_size]

    def get_chunk(self, chunk_id: int) -> Any:
        self.num_reads += 1
        return _Values(self.name, [float(str(key).strip("abc")) for key in self._part(chunk_id)])

    def __repr__(self) -> str:
        return f"Keyed('{self.name}.txt')"


class _Values:
    def __init__(self, name: str, values: list[float]) -> None:
        self.name, self.values = name, torch.tensor(values).reshape(-1, 1)

    def sequences(self, indices: Any, seed: Any) -> Any:
        return {self.name: (self.values[torch.from_numpy(indices)], None)}


KEYS = [f"a{n}" for n in range(20)]


def drawn(source: MinibatchSource, size: int = 6) -> list[tuple[float, float]]:
    pairs: list[tuple[float, float]] = []
    while minibatch := source.next_minibatch(size, {"x": "x", "y": "y"}):
        pairs.extend(
            zip(
                minibatch["x"].data.flatten().tolist(),
                minibatch["y"].data.flatten().tolist(),
                strict=True,
            )
        )
    source.close()
    return pairs


def test_sequences_are_joined_by_their_keys() -> None:
    other = Keyed("y", KEYS[::-1], 7)
    pairs = drawn(MinibatchSource([Keyed("x", KEYS, 3), other], max_sweeps=1))
    assert sorted(pairs) == [(n, n) for n in range(20)]
    assert other.num_reads == 3  # once for all chunks of the first one


def test_without_keys_they_are_joined_by_their_positions() -> None:
    other = Keyed("y", KEYS[::-1], 7, has_keys=False)
    pairs = drawn(MinibatchSource([Keyed("x", KEYS, 3), other], max_sweeps=1))
    assert sorted(pairs) == [(n, 19 - n) for n in range(20)]


def test_other_numbers_of_sequences_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"Keyed\('x.txt'\) 20, Keyed\('y.txt'\) 19. Give each sequence in all"
    ):
        MinibatchSource([Keyed("x", KEYS, 3), Keyed("y", KEYS[1:], 3)])


def test_other_keys_are_refused() -> None:
    others = [*KEYS[1:], "b7"]
    with pytest.raises(
        DataError, match=r"1 sequences of Keyed\('x.txt'\) are not in Keyed\('y.txt'\).*key 'a0'"
    ):
        MinibatchSource([Keyed("x", KEYS, 3), Keyed("y", others, 3)])
    with pytest.raises(DataError, match=r"y.txt'\) has several sequences with the key 'a1'"):
        MinibatchSource([Keyed("x", KEYS, 3), Keyed("y", [*KEYS[:-1], "a1"], 3)])
    with pytest.raises(DataError, match=r"x.txt'\) has several sequences with the key 'a1'"):
        MinibatchSource([Keyed("x", [*KEYS[1:], "a1"], 3), Keyed("y", KEYS, 3)])


def test_a_stream_may_define_the_minibatch_size() -> None:
    second = Keyed("y", KEYS, 3, defines_mb_size=True)
    assert drawn(MinibatchSource([Keyed("x", KEYS, 3), second], max_sweeps=1))
    with pytest.raises(UsageError, match="2 streams have defines_mb_size=True"):
        MinibatchSource([Keyed("x", KEYS, 3, defines_mb_size=True), second])


def test_streams_of_the_same_name_are_refused() -> None:
    with pytest.raises(UsageError, match="Several streams have the name x"):
        MinibatchSource([Keyed("x", KEYS, 3), Keyed("x", KEYS, 3)])
    with pytest.raises(UsageError, match="at least one deserializer"):
        MinibatchSource([])


def test_chunks_of_the_second_are_dropped_with_those_of_the_first() -> None:
    keys = [f"a{n}" for n in range(300)]
    first, second = Keyed("x", keys, 10), Keyed("y", keys, 4, has_keys=False)
    source = MinibatchSource([first, second], max_sweeps=1, randomization_window_in_chunks=4)
    held = source._deserializer._others[0]._held  # type: ignore[attr-defined]
    most = 0
    while source.next_minibatch(5):
        most = max(most, len(held))
    source.close()
    assert 3 <= most <= 5 * 4
    assert np.isclose(second.num_reads, 75 * 1.5, rtol=0.5)


@pytest.mark.parametrize("options", [{}, {"frame_mode": True}, {"truncation_length": 2}])
def test_a_pickled_source_continues(options: Any) -> None:
    second = Keyed("y", KEYS[::-1], 7)
    source = MinibatchSource([Keyed("x", KEYS, 3), second], max_sweeps=1, **options)
    source.next_minibatch(5)  # its threads are running
    copied = pickle.loads(pickle.dumps(source))
    pairs = drawn(copied)
    assert pairs == drawn(source)
    assert len(pairs) == (18 if "truncation_length" in options else 15)
