"""Batches that wrap over the end of the epoch, as Chainer's."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader

from torchmn.data import SerialIterator, SubDataset, scatter_index
from torchmn.errors import UsageError
from torchmn.testing import run_ranks


def iterator(length: int, batch_size: int, **options: object) -> SerialIterator[list[int]]:
    return SerialIterator(range(length), batch_size, collate_fn=list, **options)


def iterations_per_epoch(batches: SerialIterator[list[int]], num_epochs: int) -> list[int]:
    counts = [0] * num_epochs
    while batches.epoch < num_epochs:
        counts[batches.epoch] += 1
        next(batches)
    return counts


@pytest.mark.parametrize(
    ("size", "expected", "of_a_loader"),
    [(1, [79, 78, 78, 78], 79), (2, [40, 39, 39, 39], 40), (4, [20, 20, 19, 20], 20)],
)
def test_the_source_documents_iterations(size: int, expected: list[int], of_a_loader: int) -> None:
    """2,500 training images and batch 32 on 1, 2 and 4 workers (ancestors 4.6)."""

    def count(comm):
        shard = SubDataset(torch.arange(2500), *scatter_index(2500, comm))
        loader = DataLoader(shard, batch_size=32)
        wrapping = SerialIterator(shard, 32, seed=0)
        return iterations_per_epoch(wrapping, 4), [sum(1 for _ in loader) for _ in range(4)]

    assert run_ranks(count, size) == [(expected, [of_a_loader] * 4)] * size


def test_batches_wrap_and_are_always_full() -> None:
    batches = iterator(5, 3, shuffle=False)
    assert (batches.epoch_detail, batches.previous_epoch_detail) == (0.0, None)
    expected = [
        ([0, 1, 2], 0, 3, False),
        ([3, 4, 0], 1, 1, True),
        ([1, 2, 3], 1, 4, False),
        ([4, 0, 1], 2, 2, True),
        ([2, 3, 4], 3, 0, True),
    ]
    for number, (batch, epoch, position, is_new) in enumerate(expected):
        assert next(batches) == batch
        assert (batches.epoch, batches.current_position) == (epoch, position)
        assert batches.is_new_epoch is is_new
        assert batches.epoch_detail == pytest.approx(3 * (number + 1) / 5, rel=1e-15)
        assert batches.previous_epoch_detail == pytest.approx(3 * number / 5, rel=1e-15)


def test_each_epoch_is_a_permutation() -> None:
    batches = iterator(10, 4, seed=0)
    drawn = [index for _ in range(10) for index in next(batches)]
    epochs = [drawn[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_larger_than_the_data_set() -> None:
    batches = iterator(3, 8, shuffle=False)
    assert next(batches) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert (batches.epoch, batches.current_position, batches.is_new_epoch) == (2, 2, True)


@pytest.mark.parametrize(("length", "counts"), [(6, [4, 2]), (8, [4, 4]), (3, [3]), (0, [])])
def test_without_repeat(length: int, counts: list[int]) -> None:
    batches = iterator(length, 4, repeat=False, seed=1)
    drawn = list(batches)
    assert [len(batch) for batch in drawn] == counts
    assert sorted(index for batch in drawn for index in batch) == list(range(length))
    assert (batches.epoch, batches.is_new_epoch) == ((1, True) if length else (0, False))
    with pytest.raises(StopIteration):
        next(batches)
    batches.reset()
    assert [len(batch) for batch in batches] == counts


def test_reset_gives_the_same_order_again() -> None:
    batches = iterator(7, 3, seed=None)
    first = [next(batches) for _ in range(6)]
    batches.reset()
    assert (batches.epoch, batches.is_new_epoch, batches.previous_epoch_detail) == (0, False, None)
    assert [next(batches) for _ in range(6)] == first


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("num_before", range(8))
def test_resume_with_the_very_next_batch(num_before: int, seed: int | None) -> None:
    batches = iterator(10, 4, seed=seed)
    for _ in range(num_before):
        next(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    other = iterator(10, 4, seed=99)
    other.load_state_dict(state)
    for name in ("epoch", "is_new_epoch", "epoch_detail", "previous_epoch_detail"):
        assert getattr(other, name) == getattr(batches, name)
    assert [next(other) for _ in range(6)] == [next(batches) for _ in range(6)]


def test_resume_at_the_end_without_repeat() -> None:
    batches = iterator(5, 3, repeat=False)
    list(batches)
    other = iterator(5, 3, repeat=False)
    other.load_state_dict(batches.state_dict())
    assert list(other) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 3, "batch_size": 0}, "batch_size=0"),
        ({"length": 3, "batch_size": 1, "seed": -1}, "seed=-1"),
        ({"length": 0, "batch_size": 1}, "cannot repeat a data set of 0 samples"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        iterator(**arguments)


def test_states_that_are_none() -> None:
    batches = iterator(5, 2)
    with pytest.raises(UsageError, match="lacks current_position"):
        batches.load_state_dict({"epoch": 1, "seed": 0})
    with pytest.raises(UsageError, match="Position 9 is outside of a data set of 5"):
        batches.load_state_dict({**batches.state_dict(), "current_position": 9})


def test_samples_that_are_added_come_with_the_next_epoch() -> None:
    samples = [0, 1, 2, 3]
    iterator = SerialIterator(samples, 3, shuffle=False, collate_fn=list)
    batches = [next(iterator)]
    samples.append(4)
    batches += [next(iterator) for _ in range(3)]
    assert batches == [[0, 1, 2], [3, 0, 1], [2, 3, 4], [0, 1, 2]]
    assert iterator.epoch_detail == 2.6
