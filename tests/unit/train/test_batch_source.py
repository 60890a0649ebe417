"""Epochs of loaders: with and without a length, with samplers, with workers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchmn import GlobalSampler, SerialIterator
from torchmn.comm import Communicator
from torchmn.errors import UsageError
from torchmn.testing import run_ranks
from torchmn.train.batch_source import EpochLoader, batch_source, iterations_per_epoch


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class WrongLength(list[int]):
    """Reports a length of one less, or one more, than it has."""

    def __init__(self, values: Any, error: int) -> None:
        super().__init__(values)
        self.error = error

    def __len__(self) -> int:
        return super().__len__() + self.error


def epochs(source: Any, num_batches: int) -> list[tuple[int, bool, float]]:
    seen = []
    for _ in range(num_batches):
        next(source)
        seen.append((source.epoch, source.is_new_epoch, round(source.epoch_detail, 6)))
    return seen


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pass_is_an_epoch(num_workers: int) -> None:
    source = batch_source(DataLoader(range(5), 2, num_workers=num_workers))
    assert source.previous_epoch_detail is None
    third = round(1 / 3, 6)
    assert epochs(source, 4) == [
        (0, False, third),
        (0, False, round(2 / 3, 6)),
        (1, True, 1.0),
        (1, False, 1 + third),
    ]
    assert source.previous_epoch_detail == 1.0
    assert iterations_per_epoch(source) == 3


def test_a_resumed_pass_that_drops_its_last_batch_ends_with_a_full_one() -> None:
    """The batch that is dropped is not counted among those that are left."""

    def resume(comm: Communicator) -> list[tuple[int, bool, float]]:
        sampler = GlobalSampler(7, comm, 2, drop_last=True)
        sampler.load_state_dict({"epoch": 0, "position": 2})
        source = EpochLoader(DataLoader(range(7), batch_sampler=sampler))
        return epochs(source, 3)

    assert [end for _, end, _ in run_ranks(resume, 1)[0]] == [False, True, False]


def test_without_a_length_the_end_is_seen_one_ahead() -> None:
    source = batch_source(DataLoader(Stream(), 2))
    assert epochs(source, 4) == [(0, False, 0), (0, False, 0), (1, True, 1), (1, False, 1)]
    assert iterations_per_epoch(source) is None


def test_an_iterator_that_counts_is_taken_as_it_is() -> None:
    iterator = SerialIterator(range(10), 4)
    assert batch_source(iterator) is iterator
    assert float(iterations_per_epoch(iterator) or 0) == 2.5


def test_samplers_are_given_the_epoch() -> None:
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0, shuffle=True)
    source = batch_source(DataLoader(range(8), 4, sampler=sampler))
    orders = [torch.cat([next(source), next(source)]).tolist() for _ in range(2)]
    assert sampler.epoch == 1
    assert orders[0] != orders[1]


@pytest.mark.parametrize("num_done", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("has_own_generator", [True, False])
def test_a_shuffling_loader_resumes_in_mid_epoch(num_done: int, has_own_generator: bool) -> None:
    def make(seed: int) -> EpochLoader:
        generator = torch.Generator().manual_seed(seed) if has_own_generator else None
        return EpochLoader(DataLoader(range(10), 3, shuffle=True, generator=generator))

    torch.manual_seed(5)
    first = make(3)
    for _ in range(num_done):
        next(first)
    state, default_state = first.state_dict(), torch.get_rng_state()
    num_left = 9 if has_own_generator else 4 - num_done % 4
    expected = [next(first).tolist() for _ in range(num_left)]
    torch.manual_seed(99)
    second = make(4)
    torch.set_rng_state(default_state)
    second.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), default_state)
    assert (second.epoch, second.epoch_detail) == (num_done // 4, num_done / 4)
    assert [next(second).tolist() for _ in range(num_left)] == expected


@pytest.mark.parametrize(("loader", "message"), [(iter([1, 2]), "list_iterator"), (5, "int")])
def test_what_cannot_be_iterated_again(loader: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batch_source(loader)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader([], 2), "returned no batch"),
        (WrongLength([1, 2, 3], -1), "returned more batches"),
        (WrongLength([1, 2, 3], +1), "returned no batch"),
    ],
)
def test_lengths_that_are_wrong(loader: Any, message: str) -> None:
    source = batch_source(loader)
    with pytest.raises(UsageError, match=message):
        epochs(source, 5)


def test_the_state_of_something_else() -> None:
    state = SerialIterator(range(4), 2).state_dict()
    with pytest.raises(UsageError, match="num_done"):
        EpochLoader(DataLoader(range(4))).load_state_dict(state)


def test_the_state_of_a_longer_epoch() -> None:
    source = EpochLoader(DataLoader(range(8), 2))
    for _ in range(3):
        next(source)
    with pytest.raises(UsageError, match="has fewer"):
        EpochLoader(DataLoader(range(4), 2)).load_state_dict(source.state_dict())
