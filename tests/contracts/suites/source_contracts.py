"""What minibatch sources must do, over any deserializer and for 1 to 4 partitions.

Each function takes a function that makes a source; it makes one for each partition, as ranks do.
It raises `ContractError` where the contract is broken.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tests.contracts.suites.communicator_contracts import require
from torchmn.cntk.readers import ChunkInfo, MinibatchSource, StreamInformation
from torchmn.errors import DataError

NUMBER = {"n": "number"}
PARTITIONS = (1, 2, 3, 4)
Make = Callable[..., MinibatchSource]


class Numbers:
    """Sequences whose samples are ``100 * sequence + place``, in chunks of uneven sizes."""

    def __init__(self, num_chunks: int = 9, lengths: Callable[[int], int] = lambda n: 1) -> None:
        counts = [3 + chunk % 3 for chunk in range(num_chunks)]
        self.starts = np.cumsum([0, *counts])
        self.lengths = np.array([lengths(n) for n in range(self.starts[-1])])
        self.num_reads: dict[int, int] = {}
        self.fails_at: int | None = None
        self.num_live = self.most_live = 0
        self._lock = threading.RLock()

    def stream_infos(self):
        return [StreamInformation("number", shape=(1,))]

    def num_chunks(self):
        return len(self.starts) - 1

    def chunk_infos(self):
        own = [self._own(chunk) for chunk in range(self.num_chunks())]
        return [
            ChunkInfo(num_sequences=len(x), num_samples=int(x.sum()), lengths=self._given(x))
            for x in own
        ]

    def get_chunk(self, chunk_id):
        if chunk_id == self.fails_at:
            raise OSError("the disk is gone")
        chunk = NumbersChunk(int(self.starts[chunk_id]), self._own(chunk_id))
        with self._lock:
            self.num_reads[chunk_id] = self.num_reads.get(chunk_id, 0) + 1
        return self.watched(chunk)

    def watched(self, chunk):
        """Count what is in memory."""
        with self._lock:
            self.num_live += 1
            self.most_live = max(self.most_live, self.num_live)
        weakref.finalize(chunk, self._gone)
        return chunk

    def _gone(self):
        with self._lock:
            self.num_live -= 1

    def _own(self, chunk):
        return self.lengths[self.starts[chunk] : self.starts[chunk + 1]]

    def _given(self, lengths):
        return lengths if (self.lengths != 1).any() else None

    def __repr__(self):
        return "Numbers('numbers.txt')"


class NumbersChunk:
    def __init__(self, first, lengths):
        self.first, self.lengths = first, lengths

    def sequences(self, indices, seed):
        own = self.lengths[indices]
        values = [
            100.0 * (self.first + index) + place
            for index, length in zip(indices, own, strict=True)
            for place in range(length)
        ]
        data = torch.tensor(values).reshape(-1, 1)
        return {"number": (data, None if (self.lengths == 1).all() else torch.from_numpy(own))}


@dataclass(frozen=True)
class Minibatch:
    """One over all partitions."""

    samples: tuple[float, ...]
    sizes: tuple[int, ...]
    """Samples of each partition."""
    num_sequences: int
    sweep_end: bool
    num_samples: int


def minibatches(sources: list[MinibatchSource], size: int | list[int]) -> Iterator[Minibatch]:
    """Draw from one source for each partition until the end."""
    step = 0
    while True:
        now = size if isinstance(size, int) else size[step % len(size)]
        parts = [
            source.next_minibatch(now, NUMBER, None, len(sources), partition)
            for partition, source in enumerate(sources)
        ]
        require(len({bool(part) for part in parts}) == 1, "{} on some partitions only")
        if not parts[0]:
            return
        data = [part["n"] for part in parts]
        require(len({part.sweep_end for part in data}) == 1, "sweep_end on some partitions only")
        samples = tuple(float(n) for part in data for n in part.data.flatten())
        for part in data:
            require(part.data.shape == (part.num_samples, 1), f"the shape {part.data.shape}")
        require(
            {source.global_num_samples for source in sources} == {len(samples)},
            f"global_num_samples {[s.global_num_samples for s in sources]} of {len(samples)}",
        )
        yield Minibatch(
            samples,
            tuple(part.num_samples for part in data),
            sum(part.num_sequences for part in data),
            data[0].sweep_end,
            len(samples),
        )
        step += 1


def drawn(
    make: Make, size: int | list[int], num_partitions: int, **options: Any
) -> list[Minibatch]:
    sources = [make(**options) for _ in range(num_partitions)]
    try:
        return list(minibatches(sources, size))
    finally:
        close(sources)


def close(sources: list[MinibatchSource]) -> None:
    for source in sources:
        source.close()


def check_partitions(make: Make) -> None:
    """The same minibatches in the same order for any number of partitions, evenly divided."""
    for size in (1, 7, [5, 12]):
        wanted = drawn(make, size, 1, max_sweeps=2)
        require(len(wanted) > 2, f"{len(wanted)} minibatches")
        for num in PARTITIONS:
            found = drawn(make, size, num, max_sweeps=2)
            where = f"minibatches of {size} over {num} partitions"
            require(
                [replace(m, sizes=()) for m in found] == [replace(m, sizes=()) for m in wanted],
                f"{where} are not those of one partition",
            )
            for m in found:
                if m.num_sequences == m.num_samples:
                    share, rest = divmod(m.num_samples, num)
                    rule = tuple(share + (rank < rest) for rank in range(num))
                    require(m.sizes == rule, f"{where}: parts of {m.sizes}, not {rule}")


def check_sweeps(make: Make) -> None:
    """Each sweep has each sample once, in an order of its own, and ends where it says."""
    sweep = drawn(make, 5, 1, max_sweeps=1)
    everything = sorted(n for m in sweep for n in m.samples)
    require(len(set(everything)) == len(everything), "a sample twice in a sweep")
    require([m.sweep_end for m in sweep] == [False] * (len(sweep) - 1) + [True], "sweep_end")
    for num in PARTITIONS:
        found = drawn(make, 5, num, max_sweeps=3)
        samples = [n for m in found for n in m.samples]
        parts = [samples[k * len(everything) : (k + 1) * len(everything)] for k in range(3)]
        require(all(sorted(part) == everything for part in parts), "sweeps of other samples")
        require(len({tuple(part) for part in parts}) == 3, "two sweeps have the same order")
        ends = np.cumsum([m.num_samples for m in found]) // len(everything)
        flags = [bool(now > before) for before, now in zip([0, *ends], ends, strict=False)]
        require([m.sweep_end for m in found] == flags, "sweep_end is not at the end of a sweep")


def check_ends(make: Make) -> None:
    """``max_samples`` counts all partitions; the end comes to all of them in one call."""
    for num in PARTITIONS:
        for limit in (3, 17):
            found = drawn(make, 6, num, max_samples=limit)
            count = sum(m.num_samples for m in found)
            last = found[-1].num_samples
            require(count - last < limit <= count + 6, f"{count} samples with max_samples={limit}")
            if all(m.num_sequences == m.num_samples for m in found):
                require(count == limit, f"{count} samples with max_samples={limit}")


def check_small_minibatches(make: Make) -> None:
    """With fewer samples than partitions some have tensors of 0 rows, and none is missing."""
    found = drawn(make, 2, 4, max_sweeps=1)
    require(all(len(m.sizes) == 4 for m in found), "a partition without a minibatch")
    require(any(0 in m.sizes for m in found), "no partition is empty")
    everything = [n for m in drawn(make, 2, 1, max_sweeps=1) for n in m.samples]
    require([n for m in found for n in m.samples] == everything, "samples are lost")


def check_sizes(make: Make) -> None:
    """A minibatch has whole sequences of up to its size, but at least one, and no gaps."""
    for size in (1, 4, 9):
        found = drawn(make, size, 2, max_sweeps=1)
        sequences = [[n for n in m.samples if n % 100 == 0] for m in found]
        require(all(sequences), "a minibatch without the beginning of a sequence")
        following = [*found[1:], None]
        for m, begun, after in zip(found, sequences, following, strict=True):
            require(len(begun) == m.num_sequences, "part of a sequence")
            require(m.num_samples <= size or m.num_sequences == 1, f"{m.num_samples} for {size}")
            if after is not None:
                number = after.samples[0] // 100
                length = sum(n // 100 == number for n in after.samples)
                require(m.num_samples + length > size, f"room for a sequence is left: {m}")


def check_states(make: Make) -> None:
    """A state resumes with the very next sample, on any number of partitions."""
    for steps in (0, 1, 4):
        for before in PARTITIONS:
            sources = [make(max_sweeps=3) for _ in range(before)]
            stream = minibatches(sources, 7)
            for _ in range(steps):
                next(stream)
            states = [source.get_checkpoint_state() for source in sources]
            rest = list(stream)
            close(sources)
            require(all(s == states[0] for s in states), f"states differ: {states}")
            state = json.loads(json.dumps(states[0]))
            after = 1 + before % 4
            resumed = [make(max_sweeps=3) for _ in range(after)]
            next(minibatches(resumed, 7))  # each is reading ahead when the state is restored
            for source in resumed:
                source.restore_from_checkpoint(state)
            found = list(minibatches(resumed, 7))
            close(resumed)
            require(
                [replace(m, sizes=()) for m in found] == [replace(m, sizes=()) for m in rest],
                f"after {steps} minibatches on {before}, other samples on {after} partitions",
            )


def check_window(make_numbers: Callable[[Numbers], Make]) -> None:
    """The chunks in memory are those of the window, for the whole sweep."""
    numbers = Numbers(60)
    make = make_numbers(numbers)
    source = make(randomization_window_in_chunks=8, max_sweeps=2)
    for _ in minibatches([source], 4):
        gc.collect(0)
    source.close()
    require(
        1 < numbers.most_live <= 8 + 2, f"{numbers.most_live} chunks in memory, the window is 8"
    )


def check_small_data(make_numbers: Callable[[Numbers], Make]) -> None:
    """Data that fits into the window is read once, not on every sweep."""
    for randomize in (True, False):
        numbers = Numbers(7)
        source = make_numbers(numbers)(max_sweeps=3, randomize=randomize)
        list(minibatches([source], 5))
        source.close()
        require(set(numbers.num_reads.values()) == {1}, f"chunks are read {numbers.num_reads}")


def check_errors(make_numbers: Callable[[Numbers], Make]) -> None:
    """What a thread raises reaches the caller, names chunk and file, and nothing is lost."""
    wanted = drawn(make_numbers(Numbers()), 4, 1, max_sweeps=1, randomize=False)
    numbers = Numbers()
    source = make_numbers(numbers)(max_sweeps=1, randomize=False)
    numbers.fails_at = 3
    found = []
    stream = minibatches([source], 4)
    for _ in range(2):
        try:
            found.extend(stream)
            require(False, "no error")
        except DataError as error:
            text = str(error)
            require("numbers.txt" in text and "the disk is gone" in text, text)
            require(isinstance(error.__cause__, OSError), "no cause")
            stream = minibatches([source], 4)
    numbers.fails_at = None
    found.extend(stream)
    source.close()
    require(found == wanted, f"after the error {found} instead of {wanted}")


CONTRACTS = [
    check_partitions,
    check_sweeps,
    check_ends,
    check_small_minibatches,
    check_sizes,
    check_states,
]
OF_NUMBERS = [check_window, check_small_data, check_errors]
