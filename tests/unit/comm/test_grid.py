"""Grids of ranks with named axes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchmn import Grid, create_multi_node_checkpointer, create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.comm.training_start import training_steps
from torchmn.data import GlobalSampler
from torchmn.errors import RankMismatchError, UnsupportedError, UsageError
from torchmn.testing import run_ranks


def test_axes_are_communicators_and_the_last_one_varies_fastest() -> None:
    def rank_main(comm: Communicator) -> tuple[dict[str, int], dict[str, list[int]]]:
        grid = Grid(comm, data=-1, pipe=2, model=1)
        assert grid.sizes == {"data": 3, "pipe": 2, "model": 1}
        assert grid.replicas is grid.data
        members = {name: getattr(grid, name).allgather_obj(comm.rank) for name in grid.sizes}
        assert grid.data.rank == grid.coordinates["data"]
        grid.finalize()
        return grid.coordinates, members

    results = run_ranks(rank_main, 6)
    assert results[3] == (
        {"data": 1, "pipe": 1, "model": 0},
        {"data": [1, 3, 5], "pipe": [2, 3], "model": [3]},
    )


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"data": 2, "model": 3}, "multiply to 6, and there are 4 ranks"),
        ({"data": -1, "model": 3}, "multiply to 3, and there are 4 ranks"),
        ({"data": -1, "model": -1}, "one of them may be -1"),
        ({"data": 0, "model": 4}, "sizes are 1 or more"),
        ({"data": 2, "sizes": 2}, "cannot be called 'sizes'"),
        ({}, "needs axes"),
    ],
)
def test_wrong_axes_are_refused_with_what_there_is(axes: dict[str, int], text: str) -> None:
    def rank_main(comm: Communicator) -> str:
        with pytest.raises(UsageError) as caught:
            Grid(comm, **axes)
        return str(caught.value)

    assert all(text in message for message in run_ranks(rank_main, 4))


def test_ranks_that_give_other_axes_all_raise() -> None:
    def rank_main(comm: Communicator) -> None:
        axes = {"data": 2, "model": 1} if comm.rank else {"data": 1, "model": 2}
        with pytest.raises(RankMismatchError, match="data=1, model=2"):
            Grid(comm, **axes)

    run_ranks(rank_main, 2)


def test_a_grid_says_what_it_is_where_a_communicator_is_wanted() -> None:
    def rank_main(comm: Communicator) -> None:
        grid = Grid(comm, data=2)
        with pytest.raises(AttributeError, match="as grid.data"):
            grid.allgather_obj(1)  # type: ignore[operator]
        with pytest.raises(UsageError, match="in this order"):
            grid.device_mesh("model")
        with pytest.raises(UnsupportedError, match="one process per rank"):
            _ = grid.data.process_group
        grid.finalize()

    run_ranks(rank_main, 2)


def train(grid: Grid, model: nn.Module, num_steps: int = 3) -> None:
    optimizer = create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.1), grid.data, model
    )
    for step in range(num_steps):
        optimizer.zero_grad()
        x = torch.full((2, 3), float(step + grid.data.rank))
        model(x).pow(2).mean().backward()
        optimizer.step()
    optimizer.close()


def part_of_model(grid: Grid) -> nn.Module:
    torch.manual_seed(grid.model.rank)
    return nn.Linear(3, 2)


@contextmanager
def saving(grid: Grid, model: nn.Module, folder: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A checkpointer of all ranks, and what it saves: the model, and an optimizer over one axis."""
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = create_multi_node_optimizer(sgd, grid.data, model)
    checkpointer = create_multi_node_checkpointer(grid, folder, "run")
    yield checkpointer, {"model": model, "optimizer": optimizer}
    optimizer.close()
    grid.finalize()


def test_a_sampler_over_all_ranks_counts_the_steps_of_an_optimizer_over_one_axis() -> None:
    def rank_main(comm: Communicator) -> tuple[int | None, int]:
        grid = Grid(comm, data=2, model=1)
        sampler = GlobalSampler(8, comm, 4)
        train(grid, part_of_model(grid), num_steps=2)
        for _ in sampler:  # left early without a step: a peek, as there is an optimizer
            break
        position = sampler.state_dict()["position"]
        grid.finalize()
        return training_steps(comm).count, position

    assert run_ranks(rank_main, 2) == [(2, 0)] * 2


def test_a_checkpoint_gives_each_rank_its_part_of_the_model(tmp_path: Path) -> None:
    """Saved by 2 x 2 ranks whose modules differ along the model axis, loaded by others."""

    def save(comm: Communicator) -> torch.Tensor:
        grid = Grid(comm, data=2, model=2)
        model = part_of_model(grid)
        train(grid, model)
        with saving(grid, model, tmp_path) as (checkpointer, state):
            checkpointer.save(3, state)
            checkpointer.finish()
        return model.weight.detach().clone()

    def resume(comm: Communicator) -> torch.Tensor:
        grid = Grid(comm, data=-1, model=2)
        model = nn.Linear(3, 2)
        with saving(grid, model, tmp_path) as (checkpointer, state):
            assert checkpointer.resume(state) == 3
        return model.weight.detach().clone()

    def resume_whole(comm: Communicator) -> str:
        checkpointer = create_multi_node_checkpointer(Grid(comm, data=2), tmp_path, "run")
        with pytest.raises(UsageError) as caught:
            checkpointer.resume({"model": nn.Linear(3, 2)})
        return str(caught.value)

    saved = run_ranks(save, 4)
    for num_ranks in (2, 4, 6):
        loaded = run_ranks(resume, num_ranks)
        for rank, weight in enumerate(loaded):
            assert torch.equal(weight, saved[rank % 2])
    messages = run_ranks(resume_whole, 2)
    assert all(
        "had different values of model/bias, model/weight" in message for message in messages
    )


def test_replicas_are_compared_along_the_data_axis(tmp_path: Path) -> None:
    def save(comm: Communicator) -> str:
        grid = Grid(comm, data=2, model=2)
        model = part_of_model(grid)
        with saving(grid, model, tmp_path) as (checkpointer, state):
            checkpointer.save(1, state)
            checkpointer.finish()
            if comm.rank == 3:
                with torch.no_grad():
                    model.bias.add_(1)
            checkpointer.save(2, state)
            with pytest.raises(RankMismatchError) as caught:
                checkpointer.finish()
        return str(caught.value)

    for message in run_ranks(save, 4):
        assert "'model/bias': rank 1, rank 3 have different values" in message
