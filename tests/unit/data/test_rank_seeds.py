"""Streams of random numbers: the same on all ranks, then other ones on each; resuming."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchmn.checkpoint import seed_ranks
from torchmn.comm.training_start import training_start
from torchmn.data import SubDataset, rank_seeds, rng_state
from torchmn.data.rank_seeds import RandomStreams
from torchmn.errors import RankMismatchError, UsageError
from torchmn.testing import run_ranks

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float, list[bool]]:
    """What a script takes from the generators."""
    mask = nn.Dropout(0.5)(torch.ones(40)) > 0
    return (random.random(), float(np.random.rand()), float(torch.rand(1)), mask.tolist())


@pytest.fixture(autouse=True)
def _own_generators():  # type: ignore[no-untyped-def]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def seeded(seed: int, rank: int) -> RandomStreams:
    return RandomStreams(seed, rank, CPU).seed_generators()


def forked(seed: int, rank: int) -> RandomStreams:
    streams = seeded(seed, rank)
    streams.fork()
    return streams


def test_all_ranks_draw_the_numbers_of_one_process_until_they_fork() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    wanted = [draw(), draw()]
    for rank in range(3):
        streams = seeded(7, rank)
        assert draw() == wanted[0]
        assert streams.is_shared
        streams.fork()
        assert not streams.is_shared
        assert (draw() == wanted[1]) == (rank == 0)


def test_forked_ranks_and_seeds_draw_other_numbers_and_each_the_same_again() -> None:
    drawn = {}
    for seed in range(3):
        for rank in range(4):
            forked(seed, rank)
            drawn[seed, rank] = draw()
            streams = forked(seed, rank)
            assert draw() == drawn[seed, rank]
            streams.fork()  # does nothing
            assert draw() not in drawn.values()
    for kind in range(4):
        assert len({str(numbers[kind]) for numbers in drawn.values()}) == len(drawn)


def test_where_ranks_fork_decides_what_they_draw() -> None:
    seen = []
    for num_drawn in range(3):
        streams = seeded(0, 1)
        torch.rand(num_drawn)
        streams.fork()
        seen.append(draw())
    assert seen[0] != seen[1] != seen[2]


def test_numbers_drawn_apart_leave_the_shared_ones_alone() -> None:
    apart = []
    for rank in range(3):
        streams = seeded(0, rank)
        wanted = [draw(), draw()]
        streams = seeded(0, rank)
        for _ in range(2):
            streams.draw_apart()
            streams.draw_apart()  # does nothing
            apart.append(draw())
            streams.draw_together()
        assert [draw(), draw()] == wanted
        streams.draw_together()  # does nothing
    assert len({*map(str, apart)}) == 6


@pytest.mark.parametrize("rank", [0, 1])
def test_fork_while_drawing_apart(rank: int) -> None:
    streams = seeded(0, rank)
    state = streams.state_dict()
    wanted = draw()
    streams.load_state_dict(state)
    streams.draw_apart()
    streams.fork()
    first = draw()
    streams.draw_together()
    assert (first == wanted) == (rank == 0)
    assert draw() not in (wanted, first)


@pytest.mark.parametrize("rank", [0, 1])
def test_resume(rank: int, tmp_path: Path) -> None:
    streams = forked(7, rank)
    draw()
    torch.save(streams.state_dict(), tmp_path / "state")
    expected = [draw(), draw()]
    other = seeded(0, rank)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    other.fork()  # as training begins: does nothing
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_resume_before_the_fork(rank: int, tmp_path: Path) -> None:
    streams = seeded(7, rank)
    streams.draw_apart()
    streams.draw_together()
    torch.save(streams.state_dict(), tmp_path / "state")

    def go_on(streams: RandomStreams) -> list[object]:
        seen = [draw()]
        streams.draw_apart()
        seen.append(draw())
        streams.draw_together()
        streams.fork()
        return [*seen, draw()]

    expected = go_on(streams)
    other = forked(7, rank)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert other.is_shared
    assert go_on(other) == expected


def test_resume_on_more_ranks() -> None:
    streams = [forked(7, 0), forked(7, 1)]
    states = []
    for one in streams:
        draw()
        states.append(one.state_dict())
    seen = []
    for rank in range(4):
        new = seeded(7, rank)
        own = new.reshard_state_dict(states, SimpleNamespace(rank=rank, size=4))
        new.load_state_dict(own)
        assert not new.is_shared
        seen.append(draw())
        new.load_state_dict(own)
        assert draw() == seen[-1]
    streams[1].load_state_dict(states[1])
    assert seen[1] == draw()
    assert len({str(numbers) for numbers in seen}) == 4


def test_resume_on_more_ranks_before_the_fork() -> None:
    states = [seeded(7, rank).state_dict() for rank in range(2)]
    seen = []
    for rank in range(4):
        new = forked(3, rank)
        new.load_state_dict(new.reshard_state_dict(states, SimpleNamespace(rank=rank, size=4)))
        assert new.is_shared
        seen.append(draw())
    assert seen.count(seen[0]) == 4


@pytest.fixture
def of_process():  # type: ignore[no-untyped-def]
    """Streams of rank 1 of 2 that are those of this process."""
    streams = seeded(7, 1)
    rank_seeds.adopt(streams)
    yield streams
    rank_seeds.adopt(None)


def ranks(rank: int, size: int, gathered: object = None) -> Any:
    return SimpleNamespace(
        rank=rank,
        size=size,
        device=CPU,
        allgather_obj=lambda own: [own if each is None else each for each in gathered],
        on_finalize=lambda function: None,
    )


@pytest.mark.parametrize("has_forked", [False, True])
@pytest.mark.parametrize("num_old", [1, 2])
def test_a_checkpoint_holds_whether_numbers_are_shared(
    of_process: RandomStreams, has_forked: bool, num_old: int
) -> None:
    if has_forked:
        of_process.fork()
    state = rank_seeds.capture(CPU)
    wanted = draw()
    of_process.load_state_dict(seeded(0, 0).state_dict())
    rank_seeds.restore(state, 5, ranks(1, 2), num_old)
    rng_state.check(state)
    assert of_process.is_shared == (not has_forked)
    # What is not shared is another stream on a rank that was not there.
    assert (draw() == wanted) == (num_old == 2 or not has_forked)
    training_start.begin()
    assert not of_process.is_shared


def test_a_framework_that_seeds_all_ranks_alike() -> None:
    try:
        torch.manual_seed(3)
        own = rank_seeds.position(), "another process", False
        rank_seeds.share_equal_numbers(ranks(1, 2, [("other", *own[1:]), None]))
        assert rank_seeds.current() is rank_seeds._NONE
        rank_seeds.share_equal_numbers(ranks(1, 2, [own, None]))
        streams = rank_seeds.current()
        assert streams.is_shared
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(3)))
        # A state of each rank is restored.
        rank_seeds.share_equal_numbers(ranks(1, 2, [own, None]))
        assert not streams.is_shared
        # The next run seeds again.
        torch.manual_seed(3)
        rank_seeds.share_equal_numbers(ranks(1, 2, [own, None]))
        assert rank_seeds.current() is not streams
        assert rank_seeds.current().is_shared
    finally:
        rank_seeds.adopt(None)


def test_ranks_that_are_threads_share_their_generators_anyway() -> None:
    for streams in run_ranks(lambda comm: seed_ranks(5, comm), 2):
        assert not streams.is_shared
    assert rank_seeds.current() is rank_seeds._NONE


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_of_a_shard_while_numbers_are_shared(method: str) -> None:
    seen = []
    for rank in range(2):
        streams = seeded(1, rank)
        rank_seeds.adopt(streams)
        shard = SubDataset(Augmented(), 0, 4)
        shard.is_of_one_rank = True
        options = {"num_workers": 1, "multiprocessing_context": method}
        seen += [column.tolist() for batch in DataLoader(shard, 4, **options) for column in batch]
        assert streams.is_shared
    rank_seeds.adopt(None)
    assert len({value for column in seen for value in column}) == 24


class Augmented(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_loader_workers_of_ranks_draw_other_numbers() -> None:
    seen = []
    for rank in range(3):
        forked(1, rank)
        for batch in DataLoader(Augmented(), batch_size=2, num_workers=2):
            seen += [value for column in batch for value in column.tolist()]
    assert len(set(seen)) == len(seen) == 36


def test_ranks_that_disagree_and_what_is_no_seed() -> None:
    def attempt(comm):
        with pytest.raises(RankMismatchError, match="seed is 3 on rank 0 and 4 on rank 1"):
            seed_ranks(3 + comm.rank, comm)
        for seed in (-1, 2**32, 0.5, None):
            with pytest.raises(UsageError, match="needs an integer from 0"):
                seed_ranks(seed, comm)
        return seed_ranks(5, comm).seed

    first, second = run_ranks(attempt, 2)
    assert (first, second) == (5, seeded(5, 1).seed)
