"""The order of samples does not depend on the number of workers."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchmn import create_multi_node_optimizer
from torchmn.comm.training_start import training_steps
from torchmn.data import EmptyBatchCollate, GlobalSampler, scatter_loader
from torchmn.errors import RankMismatchError, UsageError
from torchmn.testing import run_ranks

SIZES = [1, 2, 3, 4]


class Placement:
    """As much of a communicator as samplers use, on a world where all ranks agree."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.rank_label = rank, size, f"rank {rank}"

    def allgather_obj(self, value: object) -> list[object]:
        return [value] * self.size

    def bcast_obj(self, value: object, root: int = 0) -> object:
        return value


def samplers(size: int, length: int, global_batch: int, **options: object) -> list[GlobalSampler]:
    return [GlobalSampler(length, Placement(r, size), global_batch, **options) for r in range(size)]


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


def test_collective_on_real_ranks() -> None:
    def batches(comm):
        return list(GlobalSampler(10, comm, 4, shuffle=False))

    assert run_ranks(batches, 3) == [[[0, 1], [4, 5], [8]], [[2], [6], [9]], [[3], [7], []]]


def test_ranks_that_disagree() -> None:
    def attempt(comm):
        with pytest.raises(RankMismatchError, match="dataset_length is 10 on rank 0 and 11"):
            GlobalSampler(11 if comm.rank == 2 else 10, comm, 4)

    run_ranks(attempt, 3)


@settings(max_examples=80, deadline=None)
@given(
    length=st.integers(1, 40),
    batches=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    sizes=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    num_steps=st.integers(0, 12),
)
def test_stop_and_continue_with_other_workers(
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


FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
LOADERS = [
    pytest.param({}, id="no workers"),
    pytest.param(
        {"num_workers": 2, "prefetch_factor": 3},
        id="workers",
        marks=[pytest.mark.processes, FORKS],
    ),
    pytest.param(
        {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True},
        id="workers that stay",
        marks=[pytest.mark.processes, FORKS],
    ),
]


def alone_with_steps(
    num_samples: int, **options: Any
) -> tuple[Placement, GlobalSampler, DataLoader[Any]]:
    """One rank whose steps are counted, with batches of 4."""
    place = Placement(0, 1)
    training_steps(place).count = 0
    sampler = GlobalSampler(num_samples, place, 4)
    return place, sampler, counted(sampler, num_samples, **options)


def counted(sampler: GlobalSampler, num_samples: int, **options: Any) -> DataLoader[Any]:
    """A loader of ours with this sampler."""
    loader = DataLoader(torch.arange(num_samples), batch_sampler=sampler, **options)
    return scatter_loader(loader, Placement(sampler.rank, sampler.size))


@pytest.mark.parametrize("options", LOADERS)
def test_the_state_counts_what_the_loop_has_got_and_not_what_was_drawn(
    options: dict[str, Any],
) -> None:
    (sampler,) = samplers(1, 40, 4)
    seen: list[int] = []
    for num, batch in enumerate(counted(sampler, 40, **options), start=1):
        seen += batch.tolist()
        assert sampler.state_dict() == sampler.state_after(num)
        assert sampler.position == 4 * num % 40
        if num == 2:
            assert sampler._pass.num_drawn == 2 + options.get("num_workers", 0) * 3
            state = sampler.state_dict()
    assert sampler.state_dict() == {"epoch": 1, "position": 0}
    assert seen == sampler.order(0).tolist()
    (again,) = samplers(1, 40, 4)
    again.load_state_dict(state)
    rest = [i for batch in counted(again, 40, **options) for i in batch.tolist()]
    assert seen[:8] + rest == sampler.order(0).tolist()


@pytest.mark.parametrize("options", LOADERS)
def test_a_plain_loader_counts_what_was_drawn_and_says_so_where_that_is_ahead(
    options: dict[str, Any],
) -> None:
    (sampler,) = samplers(1, 40, 4)
    batches = iter(DataLoader(torch.arange(40), batch_sampler=sampler, **options))
    next(batches)
    num_ahead = options.get("num_workers", 0) * options.get("prefetch_factor", 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sampler.position == 4 + 4 * num_ahead
        assert sampler.state_after(1) == {"epoch": 0, "position": 4}
    assert ["torchmn.scatter_loader" in str(each.message) for each in caught] == [True] * bool(
        num_ahead
    )
    list(batches)
    assert sampler.state_dict() == {"epoch": 1, "position": 0}


@pytest.mark.processes
@FORKS
def test_a_plain_loader_whose_loop_has_ended_is_not_ahead() -> None:
    (sampler,) = samplers(1, 8, 4)
    loader = DataLoader(torch.arange(8), batch_sampler=sampler, num_workers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert len([*loader]) == 2
        assert sampler.samples_seen == 16


@pytest.mark.parametrize("position", [0, 4])
@pytest.mark.parametrize("num_steps", [None, 0])
@pytest.mark.parametrize("options", LOADERS)
def test_a_look_at_the_last_batch_does_not_end_the_epoch(
    options: dict[str, object], num_steps: int | None, position: int
) -> None:
    """Prefetching workers have drawn the end of the epoch by then."""
    place = Placement(0, 1)
    training_steps(place).count = num_steps
    sampler = GlobalSampler(4 + position, place, 4)
    sampler.load_state_dict({"epoch": 0, "position": position})
    loader = counted(sampler, 4 + position, **options)
    for _ in range(2):
        next(iter(loader))
        assert sampler.state_dict() == {"epoch": 0, "position": position}
    assert [i for batch in loader for i in batch] == sampler.order(0)[position:].tolist()
    assert sampler.state_dict() == {"epoch": 1, "position": 0}
    for _ in loader:  # without a step to its end, as in an evaluation
        assert sampler.received_batch == 4
    assert sampler.state_dict() == {"epoch": 2, "position": 0}


@pytest.mark.parametrize("options", LOADERS)
def test_a_pass_that_is_left_after_the_step_of_its_last_batch_has_ended(
    options: dict[str, object],
) -> None:
    place, sampler, loader = alone_with_steps(8, **options)
    for epoch in range(2):
        next(iter(loader))
        for num, _ in enumerate(loader, start=1):
            assert sampler.samples_seen == 8 * epoch + 4 * num
            training_steps(place).count += 1
            if num == 2:
                break
        assert sampler.state_dict() == {"epoch": epoch + 1, "position": 0}


@pytest.mark.processes
@FORKS
def test_a_loop_over_persistent_workers_is_one_until_it_is_left() -> None:
    """Its DataLoader holds on to the iterator, which other loops may hold as well."""
    _, sampler, loader = alone_with_steps(24, num_workers=1, persistent_workers=True)
    held = iter(loader)
    next(held)
    assert sampler.position == 4
    del held
    assert sampler.position == 0
    for _, _ in zip(loader, "ab", strict=False):
        assert sampler.position > 0
    assert sampler.position == 0  # no step was taken
    held = iter(loader)
    del loader  # now only the loop has it
    next(held)
    assert sampler.position == 4
    del held
    assert sampler.position == 0


def test_an_iterator_is_not_kept_alive() -> None:
    (sampler,) = samplers(1, 8, 4)
    iterator = iter(counted(sampler, 8))
    alive = weakref.ref(iterator)
    gc.disable()
    try:
        next(iterator)
        del iterator
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("options", LOADERS)
def test_a_pass_that_is_left_after_training_continues_where_it_was(
    options: dict[str, object],
) -> None:
    place, sampler, loader = alone_with_steps(40, **options)
    seen: list[int] = []
    for num_batches in (1, 3, 100):
        for num, batch in enumerate(loader, start=1):
            seen += batch.tolist()
            training_steps(place).count += 1
            if num == num_batches:
                break
    assert seen == sampler.order(0).tolist()


def test_batches_without_a_training_step_are_returned_again() -> None:
    place = Placement(0, 1)
    training_steps(place).count = 7
    sampler = GlobalSampler(40, place, 4)
    for _ in range(2):  # for example a statistic of the first batches
        looked_at = [i for batch, _ in zip(sampler, range(3), strict=False) for i in batch]
        assert looked_at[:12] == sampler.order(0)[:12].tolist()
    training_steps(place).count = None  # steps are not counted: more than one batch means training
    for _, _ in zip(sampler, range(3), strict=False):
        pass
    assert sampler.position > 0


def test_an_optimizer_counts_the_steps() -> None:
    def train(comm):
        model = nn.Linear(2, 1)
        optimizer = create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), comm, model
        )
        data = TensorDataset(torch.rand(16, 2), torch.rand(16, 1))
        loader = DataLoader(data, batch_sampler=GlobalSampler(16, comm, 4))
        positions = [loader.batch_sampler.position]
        next(iter(loader))
        positions.append(loader.batch_sampler.position)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            break
        positions.append(loader.batch_sampler.position)
        return positions

    assert run_ranks(train, 2) == [[0, 0, 4]] * 2


def test_a_sampler_given_as_sampler_or_of_other_ranks_is_refused() -> None:
    (sampler,) = samplers(1, 8, 4)
    with pytest.raises(UsageError, match="batch_sampler=sampler"):
        scatter_loader(DataLoader(torch.arange(8), sampler=sampler, batch_size=2), Placement(0, 1))
    with pytest.raises(UsageError, match="divides among 1 ranks, and the communicator has 2"):
        scatter_loader(DataLoader(torch.arange(8), batch_sampler=sampler), Placement(0, 2))


# ---- the last global batch


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("length", "num_full"), [(21, 2), (24, 3), (8, 1)])
def test_drop_last(length: int, num_full: int, size: int) -> None:
    ranks = samplers(size, length, 8, drop_last=True)
    for epoch in range(2):
        assert [len(sampler) for sampler in ranks] == [num_full] * size
        order = ranks[0].order(epoch)[: 8 * num_full].tolist()
        assert [i for batch in global_batches(ranks) for i in batch] == order
        assert ranks[0].state_dict() == {"epoch": epoch + 1, "position": 0}


def test_samples_seen_are_whole_epochs_with_drop_last() -> None:
    """Durations in epochs depend on it."""
    (sampler,) = samplers(1, 23, 7, drop_last=True)
    assert sum(len(part) for _ in range(2) for part in sampler) == 42
    assert sampler.samples_seen == 46


def test_drop_last_in_the_middle_of_an_epoch_and_with_another_global_batch() -> None:
    (sampler,) = samplers(1, 21, 8, drop_last=True)
    sampler.load_state_dict({"epoch": 0, "position": 8})
    assert len(list(sampler)) == 1
    sampler.load_state_dict({"epoch": 0, "position": 15})
    assert sampler.state_dict() == {"epoch": 1, "position": 0}
    assert len(list(sampler)) == 2


@pytest.mark.parametrize("size", SIZES)
def test_pad_last_gives_every_rank_a_sample(size: int) -> None:
    ranks = samplers(size, 17, 8, shuffle=False, pad_last=True)
    parts = list(zip(*ranks, strict=True))
    assert [[i for part in step for i in part] for step in parts[:2]] == [
        list(range(8)),
        list(range(8, 16)),
    ]
    assert parts[2] == ([16],) * size
    assert ranks[0].state_dict() == {"epoch": 1, "position": 0}


def test_pad_last_leaves_a_batch_that_is_large_enough_alone() -> None:
    ranks = samplers(3, 12, 8, shuffle=False, pad_last=True)
    assert list(zip(*ranks, strict=True))[1] == ([8, 9], [10], [11])
    ranks = samplers(3, 10, 8, shuffle=False, pad_last=True)
    assert list(zip(*ranks, strict=True))[1] == ([8], [9], [8])


def test_a_loader_of_ours_makes_the_empty_batch_of_a_short_last_one() -> None:
    for sampler, num in zip(samplers(2, 17, 8), (1, 0), strict=True):
        assert [len(batch) for batch in counted(sampler, 17)] == [4, 4, num]
        own = counted(sampler, 17, collate_fn=EmptyBatchCollate(range(3)))
        assert len([*own][2]) == num


def test_what_contradicts_itself_about_the_last_batch() -> None:
    with pytest.raises(UsageError, match="drops all 7 samples"):
        samplers(2, 7, 8, drop_last=True)
    with pytest.raises(UsageError, match="only one of them"):
        samplers(2, 9, 8, drop_last=True, pad_last=True)


def test_state_after_counts_from_where_the_pass_began() -> None:
    (sampler,) = samplers(1, 10, 4)
    sampler.load_state_dict({"epoch": 2, "position": 5})
    list(sampler)
    assert sampler.state_after(0) == {"epoch": 2, "position": 5}
    assert sampler.state_after(1) == {"epoch": 2, "position": 9}
    assert sampler.state_after(2) == {"epoch": 3, "position": 0}
    with pytest.raises(UsageError, match="has 2 batches"):
        sampler.state_after(3)


def test_set_epoch_keeps_an_epoch_in_progress() -> None:
    (sampler,) = samplers(1, 10, 4)
    sampler.load_state_dict({"epoch": 1, "position": 4})
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "position": 4}
    sampler.set_epoch(5)
    assert sampler.state_dict() == {"epoch": 5, "position": 0}
    assert next(iter(sampler)) == sampler.order(5)[:4].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": -1, "global_batch": 4}, "dataset_length=-1"),
        ({"length": 5, "global_batch": 0}, "global_batch=0"),
        ({"length": 5, "global_batch": 4, "seed": -2}, "seed=-2"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        samplers(1, **arguments)


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 0}, {"epoch": 0, "position": 11}, {"epoch": -1, "position": 0}, None]
)
def test_states_that_are_none(state: object) -> None:
    (sampler,) = samplers(1, 10, 4)
    with pytest.raises(UsageError):
        sampler.load_state_dict(state)


# ---- the empty part


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


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (lambda samples: torch.stack(samples, 1), (2, 0)),  # the time first
        (lambda samples: torch.cat(samples), (0,)),
        (lambda samples: torch.stack(samples)[None, ..., None], (1, 0, 2, 1)),
    ],
)
def test_the_dimension_of_samples_is_found(
    collate: Callable[[list[torch.Tensor]], torch.Tensor], expected: tuple[int, ...]
) -> None:
    assert EmptyBatchCollate([torch.ones(2)], collate)([]).shape == expected


def test_a_batch_of_lists_is_one_of_empty_lists() -> None:
    """As torchvision's collate function for detection, and what is the same in every batch."""
    sample = (torch.ones(3, 4, 4), {"boxes": torch.ones(2, 4)})
    collate = EmptyBatchCollate([sample], lambda samples: (*zip(*samples, strict=True), "coco"))
    assert collate([]) == ((), (), "coco")


class OnDevice(UserDict[str, Any]):
    """As the BatchEncoding of transformers: a dict by its methods, with others of its own."""

    def to(self, device: str) -> OnDevice:
        return OnDevice({key: value.to(device) for key, value in self.items()})


def test_a_batch_keeps_the_class_and_methods_of_a_dict() -> None:
    def collate(samples: list[torch.Tensor]) -> OnDevice:
        return OnDevice(x=torch.stack(samples))

    batch = EmptyBatchCollate([torch.ones(3)], collate)([])
    assert batch.to("cpu")["x"].shape == (0, 3)
    ordered = EmptyBatchCollate(
        [torch.ones(3)], lambda samples: OrderedDict(x=torch.stack(samples))
    )
    assert type(ordered([])) is OrderedDict


def test_a_batch_that_cannot_be_empty() -> None:
    with pytest.raises(UsageError, match="from a int"):
        EmptyBatchCollate([1], collate_fn=len)([])
    with pytest.raises(UsageError, match="from a object"):
        EmptyBatchCollate([1], collate_fn=lambda samples: object())([])
