"""The order of samples does not depend on the number of workers."""

from __future__ import annotations

import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchmn.data import EmptyBatchCollate, GlobalSampler
from torchmn.errors import DisagreementError, UsageError
from torchmn.testing import run_ranks

SIZES = [1, 2, 3, 4]


class Place:
    """As much of a communicator as the sampler uses, on a world where all ranks agree."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def allgather_obj(self, words: object) -> list[object]:
        return [words] * self.size


def samplers(size: int, length: int, global_batch: int, **options: object) -> list[GlobalSampler]:
    return [GlobalSampler(length, Place(r, size), global_batch, **options) for r in range(size)]


def global_batches(ranks: list[GlobalSampler]) -> list[list[int]]:
    """One pass: what all ranks together have in each step, in rank order."""
    parts = zip(*(list(sampler) for sampler in ranks), strict=True)
    return [[index for part in parts_of_step for index in part] for parts_of_step in parts]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("length", "global_batch"), [(20, 8), (21, 8), (24, 8), (3, 8), (0, 8)])
def test_same_batches_on_any_number_of_ranks(
    length: int, global_batch: int, size: int, shuffle: bool
) -> None:
    ranks = samplers(size, length, global_batch, seed=5, shuffle=shuffle)
    for epoch in range(2):
        order = ranks[0].order(epoch).tolist()
        assert sorted(order) == list(range(length))
        assert global_batches(ranks) == [
            order[i : i + global_batch] for i in range(0, length, global_batch)
        ]


@pytest.mark.parametrize("size", SIZES)
def test_parts_are_as_even_as_possible(size: int) -> None:
    for parts in zip(*samplers(size, 23, 8), strict=True):
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)


def test_permutations_of_epochs_and_seeds_differ() -> None:
    (one,), (other,) = samplers(1, 50, 8, seed=0), samplers(1, 50, 8, seed=1)
    orders = [one.order(0), one.order(1), other.order(0), other.order(1)]
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_collective_on_real_ranks() -> None:
    def batches(comm):
        return list(GlobalSampler(10, comm, 4, shuffle=False))

    assert run_ranks(batches, 3) == [[[0, 1], [4, 5], [8]], [[2], [6], [9]], [[3], [7], []]]


def test_ranks_that_disagree() -> None:
    def attempt(comm):
        with pytest.raises(DisagreementError, match="dataset_length=10 and rank 2 .*=11"):
            GlobalSampler(11 if comm.rank == 2 else 10, comm, 4)

    run_ranks(attempt, 3)


@settings(max_examples=80, deadline=None)
@given(
    length=st.integers(1, 40),
    batches=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    sizes=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    num_steps=st.integers(0, 12),
)
def test_stop_and_go_on_with_other_workers(
    length: int, batches: tuple[int, int], sizes: tuple[int, int], num_steps: int
) -> None:
    """Nothing is lost or repeated, also with another global batch."""
    before = samplers(sizes[0], length, batches[0])
    seen = [[] for _ in before]
    passes = [iter(sampler) for sampler in before]
    num_steps = min(num_steps, len(before[0]))
    for _ in range(num_steps):
        for mine, sampler_pass in zip(seen, passes, strict=True):
            mine.append(next(sampler_pass))
    states = [sampler.state_dict() for sampler in before]
    assert all(state == states[0] for state in states)
    first = [i for parts in zip(*seen, strict=True) for part in parts for i in part]

    after = samplers(sizes[1], length, batches[1])
    for sampler in after:
        sampler.load_state_dict(states[0])
    epoch = after[0].epoch
    rest = [i for batch in global_batches(after) for i in batch]
    order = after[0].order(0).tolist()
    if epoch == 1:
        assert (first, rest) == (order, after[0].order(1).tolist())
    else:
        assert first + rest == order


def test_state_counts_the_batch_in_hand() -> None:
    (sampler,) = samplers(1, 10, 4)
    states = [sampler.state_dict()]
    for _ in sampler:
        states.append(sampler.state_dict())
    assert states == [
        {"epoch": 0, "position": 0},
        {"epoch": 0, "position": 4},
        {"epoch": 0, "position": 8},
        {"epoch": 1, "position": 0},
    ]
    assert sampler.state_dict() == states[-1]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_state_of_consumed_batches_with_data_loader_workers() -> None:
    (sampler,) = samplers(1, 24, 4)
    data = torch.arange(24)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1, prefetch_factor=3)
    consumed: list[int] = []
    for num_batches, batch in enumerate(loader, start=1):
        consumed += batch.tolist()
        if num_batches == 2:
            drawn, state = sampler.state_dict(), sampler.state_after(num_batches)
            break
    assert drawn["position"] > 8, "the loader did not draw ahead: the test shows nothing"
    assert state == {"epoch": 0, "position": 8}
    (again,) = samplers(1, 24, 4)
    again.load_state_dict(state)
    rest = [i for batch in DataLoader(data, batch_sampler=again) for i in batch.tolist()]
    assert consumed + rest == sampler.order(0).tolist()


def test_state_after_counts_from_where_the_pass_began() -> None:
    (sampler,) = samplers(1, 10, 4)
    sampler.load_state_dict({"epoch": 2, "position": 5})
    list(sampler)
    assert sampler.state_after(0) == {"epoch": 2, "position": 5}
    assert sampler.state_after(1) == {"epoch": 2, "position": 9}
    assert sampler.state_after(2) == {"epoch": 3, "position": 0}
    with pytest.raises(UsageError, match="has 2 batches"):
        sampler.state_after(3)


def test_set_epoch_keeps_an_epoch_under_way() -> None:
    (sampler,) = samplers(1, 10, 4)
    sampler.load_state_dict({"epoch": 1, "position": 4})
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "position": 4}
    sampler.set_epoch(5)
    assert sampler.state_dict() == {"epoch": 5, "position": 0}
    assert next(iter(sampler)) == sampler.order(5)[:4].tolist()


def test_passes_are_epochs() -> None:
    (sampler,) = samplers(1, 6, 4)
    assert [[i for batch in sampler for i in batch] for _ in range(3)] == [
        sampler.order(epoch).tolist() for epoch in range(3)
    ]


def test_sizes() -> None:
    ranks = samplers(3, 10, 8)
    assert [len(sampler) for sampler in ranks] == [2, 2, 2]
    assert [sampler.local_batch for sampler in ranks] == [3, 3, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": -1, "global_batch": 4}, "dataset_length is -1"),
        ({"length": 5, "global_batch": 0}, "global_batch is 0"),
        ({"length": 5, "global_batch": 4, "seed": -2}, "seed is -2"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        samplers(1, **arguments)


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 0}, {"epoch": 0, "position": 11}, {"epoch": -1, "position": 0}, None]
)
def test_states_that_are_none(state: object) -> None:
    (sampler,) = samplers(1, 10, 4)
    with pytest.raises(UsageError):
        sampler.load_state_dict(state)


# ---- the empty part


def loaders(size: int, length: int, global_batch: int, **options: object) -> list[DataLoader]:
    data = TensorDataset(torch.rand(length, 1, 4, 4), torch.arange(length))
    return [
        DataLoader(data, batch_sampler=s, collate_fn=EmptyBatchCollate(data), **options)
        for s in samplers(size, length, global_batch)
    ]


def test_a_rank_without_a_part_gets_a_batch_of_no_rows() -> None:
    steps = list(zip(*loaders(4, 10, 8), strict=True))
    counts = [[len(labels) for _, labels in step] for step in steps]
    assert counts == [[2, 2, 2, 2], [1, 1, 0, 0]]
    images, labels = steps[1][3]
    assert (images.shape, images.dtype) == ((0, 1, 4, 4), torch.float32)
    assert (labels.shape, labels.dtype) == ((0,), torch.int64)


def test_a_step_with_an_empty_batch_has_gradients_of_zero() -> None:
    images, labels = list(loaders(4, 10, 8)[3])[1]
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 10))
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
    loss.backward()
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters())
    assert torch.isfinite(model[1].running_var).all()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_an_empty_batch_from_a_worker() -> None:
    loader = loaders(4, 9, 8, num_workers=1)[3]
    assert [len(labels) for _, labels in loader] == [2, 0]


Pair = namedtuple("Pair", "x name")


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({"x": torch.ones(2), "name": "a"}, {"x": (0, 2), "name": []}),
        ((1, [2.0, 3]), [(0,), [(0,), (0,)]]),
        (Pair(np.ones(3), "b"), Pair((0, 3), ())),
    ],
)
def test_empty_batches_of_any_structure(sample: object, expected: object) -> None:
    def shapes(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape)
        if isinstance(value, dict):
            return {key: shapes(item) for key, item in value.items()}
        if isinstance(value, Pair):
            return Pair(*map(shapes, value))
        return type(value)(map(shapes, value))

    collate = pickle.loads(pickle.dumps(EmptyBatchCollate([sample])))
    assert shapes(collate([])) == expected


def test_a_batch_that_cannot_be_empty() -> None:
    with pytest.raises(UsageError, match="made of a object"):
        EmptyBatchCollate([1], collate_fn=lambda samples: object())([])
