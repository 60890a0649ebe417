"""Streams of random numbers: other ones on each rank, the same again, continued after a resume."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchmn.checkpoint import RandomStreams, seed_ranks
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


def test_ranks_and_seeds_draw_other_numbers_and_each_the_same_again() -> None:
    drawn = {}
    for seed in range(3):
        for rank in range(4):
            RandomStreams(seed, rank, CPU)
            drawn[seed, rank] = draw()
            RandomStreams(seed, rank, CPU)
            assert draw() == drawn[seed, rank]
    for kind in range(4):
        assert len({str(numbers[kind]) for numbers in drawn.values()}) == len(drawn)


def test_rank_0_has_the_numbers_of_a_script_for_one_worker() -> None:
    RandomStreams(7, 0, CPU)
    ours = draw()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert ours == draw()


@pytest.mark.parametrize("rank", [0, 1])
def test_resume(rank: int, tmp_path: Path) -> None:
    streams = RandomStreams(7, rank, CPU)
    draw()
    torch.save(streams.state_dict(), tmp_path / "state")
    expected = [draw(), draw()]
    other = RandomStreams(0, rank, CPU)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert [draw(), draw()] == expected


def test_resume_on_more_ranks() -> None:
    streams = [RandomStreams(7, 0, CPU), RandomStreams(7, 1, CPU)]
    states = []
    for one in streams:
        draw()
        states.append(one.state_dict())
    seen = []
    for rank in range(4):
        new = RandomStreams(7, rank, CPU)
        own = new.reshard_state_dict(states, SimpleNamespace(rank=rank, size=4))
        new.load_state_dict(own)
        seen.append(draw())
        new.load_state_dict(own)
        assert draw() == seen[-1]
    streams[1].load_state_dict(states[1])
    assert seen[1] == draw()
    assert len({str(numbers) for numbers in seen}) == 4


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
        RandomStreams(1, rank, CPU)
        for batch in DataLoader(Augmented(), batch_size=2, num_workers=2):
            seen += [value for column in batch for value in column.tolist()]
    assert len(set(seen)) == len(seen) == 36


def test_ranks_that_disagree_and_what_is_no_seed() -> None:
    def attempt(comm):
        with pytest.raises(RankMismatchError, match="got 3 on rank 0 and 4 on rank 1"):
            seed_ranks(3 + comm.rank, comm)
        for seed in (-1, 2**32, 0.5, None):
            with pytest.raises(UsageError, match="needs an integer from 0"):
                seed_ranks(seed, comm)
        return seed_ranks(5, comm).seed

    first, second = run_ranks(attempt, 2)
    assert (first, second) == (5, RandomStreams(5, 1, CPU).seed)
