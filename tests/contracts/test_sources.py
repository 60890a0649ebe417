"""Minibatch sources over each kind of deserializer, for 1 to 4 partitions."""

from functools import partial

import numpy as np
import pytest

from tests.contracts.broken import sources as broken
from tests.contracts.suites import source_contracts as contracts
from tests.contracts.suites.communicator_contracts import ContractError
from tests.contracts.suites.source_contracts import Numbers
from torchmn.cntk.readers import (
    MinibatchSource,
    MinibatchSourceFromData,
    StreamInformation,
    UserDeserializer,
)


def uneven(number: int) -> int:
    """Lengths of sequences, some longer than the minibatches of the contracts."""
    return 1 + number * 7 % 5 + 9 * (number == 11)


class User(UserDeserializer):
    """Returns arrays and has no index."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def stream_infos(self):
        return self.numbers.stream_infos()

    def num_chunks(self):
        return self.numbers.num_chunks()

    def get_chunk(self, chunk_id):
        lengths = self.numbers._own(chunk_id)
        chunk = self.numbers.get_chunk(chunk_id)
        data, _ = chunk.sequences(np.arange(len(lengths)), (0, 0))["number"]
        if (lengths == 1).all():
            return {"number": self.numbers.watched(data.numpy())}
        return {"number": [part.numpy() for part in data.split(lengths.tolist())]}

    def __repr__(self):
        return f"User({self.numbers!r})"


class Second(Numbers):
    """The same sequences in other chunks, as another stream."""

    def stream_infos(self):
        return [StreamInformation("other", shape=(1,))]

    def get_chunk(self, chunk_id):
        chunk = super().get_chunk(chunk_id)
        return Renamed(chunk)


class Renamed:
    def __init__(self, chunk):
        self.chunk = chunk

    def sequences(self, indices, seed):
        return {"other": self.chunk.sequences(indices, seed)["number"]}


def joined(numbers: Numbers, **options):
    second = Second(len(numbers.starts) - 1)
    second.starts = numbers.starts[[0, *range(2, len(numbers.starts))]]
    second.lengths = numbers.lengths
    return MinibatchSource([numbers, second], **options)


def in_memory(**options):
    data = Numbers().get_chunk(0)
    data.lengths = np.ones(36, np.int64)
    array = data.sequences(np.arange(36), (0, 0))["number"][0].numpy()
    return MinibatchSourceFromData({"number": array}, randomize=True, **options)


SOURCES = {
    "samples": lambda **options: MinibatchSource(Numbers(), **options),
    "sequences": lambda **options: MinibatchSource(Numbers(lengths=uneven), **options),
    "small window": lambda **options: MinibatchSource(
        Numbers(), randomization_window_in_chunks=4, **options
    ),
    "window in samples": lambda **options: MinibatchSource(
        Numbers(lengths=uneven), randomization_window_in_samples=30, **options
    ),
    "several threads": lambda **options: MinibatchSource(
        Numbers(), multithreaded_deserializer=True, randomization_window_in_chunks=4, **options
    ),
    "user": lambda **options: MinibatchSource(
        User(Numbers(lengths=uneven)), randomization_window_in_chunks=4, **options
    ),
    "joined": lambda **options: joined(Numbers(lengths=uneven), **options),
    "in memory": in_memory,
    "frames": lambda **options: MinibatchSource(
        Numbers(lengths=uneven), frame_mode=True, **options
    ),
}
SEQUENCES_ARE_CUT = {"frames"}


@pytest.mark.parametrize("contract", contracts.CONTRACTS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", SOURCES)
def test_contracts(kind: str, contract) -> None:
    if contract is contracts.check_sizes and kind in SEQUENCES_ARE_CUT:
        return
    contract(SOURCES[kind])


OVER_NUMBERS = {
    "deserializer": lambda numbers: partial(MinibatchSource, numbers),
    "user": lambda numbers: partial(MinibatchSource, User(numbers)),
    "joined": lambda numbers: partial(joined, numbers),
}


@pytest.mark.parametrize("contract", contracts.OF_NUMBERS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", OVER_NUMBERS)
def test_contracts_of_reading(kind: str, contract) -> None:
    contract(OVER_NUMBERS[kind])


CAUGHT_BY = {
    broken.partitions_by_chunk: (contracts.check_partitions, SOURCES["samples"]),
    broken.same_order_each_sweep: (contracts.check_sweeps, SOURCES["samples"]),
    broken.counts_its_own_partition: (contracts.check_ends, SOURCES["samples"]),
    broken.drops_short_minibatches: (contracts.check_small_minibatches, SOURCES["samples"]),
    broken.counts_sequences: (contracts.check_sizes, SOURCES["sequences"]),
    broken.saves_what_is_read_ahead: (contracts.check_states, SOURCES["samples"]),
    broken.keeps_its_read_ahead: (contracts.check_states, SOURCES["samples"]),
    broken.keeps_chunks: (contracts.check_window, OVER_NUMBERS["deserializer"]),
    broken.reads_each_sweep_again: (contracts.check_small_data, OVER_NUMBERS["deserializer"]),
    broken.loses_the_minibatch_of_an_error: (contracts.check_errors, OVER_NUMBERS["deserializer"]),
}


@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda wrong: wrong.__name__)
def test_is_caught(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    contract, make = CAUGHT_BY[wrong]
    with pytest.raises(ContractError):
        contract(make)


def test_every_contract_has_one_that_breaks_it() -> None:
    caught = {contract for contract, _ in CAUGHT_BY.values()}
    assert caught == {*contracts.CONTRACTS, *contracts.OF_NUMBERS}
