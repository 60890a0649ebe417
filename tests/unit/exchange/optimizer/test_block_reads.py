"""Models that are evaluated or saved in the middle of a block of local updates."""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.models import batch, loss_of, mlp, wrap
from torchmn import create_multi_node_checkpointer, create_multi_node_optimizer
from torchmn.errors import ResultWarning
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, PeriodicAverage, Schedule, Warmup
from torchmn.testing import run_ranks

BLOCK = 32
"""Samples over two ranks: four steps with batches of four."""
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "periodic_average": lambda: PeriodicAverage(BLOCK),
    "overlapped": lambda: PeriodicAverage(BLOCK, overlap_steps=2),
    "block_momentum": lambda: BlockMomentum(BLOCK),
    "diloco": lambda: DiLoCo(BLOCK, num_fragments=2),
    "after_every_step": lambda: Warmup(8, PeriodicAverage(BLOCK)),
}
Read = Callable[[nn.Module, Any], object]


def evaluate(model: nn.Module, optimizer: Any) -> None:
    model.eval()
    with torch.no_grad():
        loss_of(model, batch(0, 0))
    model.train()


def save(model: nn.Module, optimizer: Any) -> None:
    copy.deepcopy(model.state_dict())


def save_within(model: nn.Module, optimizer: Any) -> None:
    nn.Sequential(model).state_dict()


def average(model: nn.Module, optimizer: Any) -> None:
    """Samples drawn in training, a moving average by hand, a copy."""
    with torch.no_grad():
        loss_of(model, batch(0, 0))
        save(model, optimizer)
    copy.deepcopy(model)


def finetune(model: nn.Module, optimizer: Any) -> None:
    """Layers in eval mode, trained."""
    model.eval()
    loss_of(model, batch(0, 0))
    model.train()


def checkpoint(model: nn.Module, optimizer: Any) -> None:
    """By hand, on every rank."""
    model.state_dict()
    optimizer.state_dict()
    model.state_dict()


def flushed(model: nn.Module, optimizer: Any) -> None:
    optimizer.flush()
    evaluate(model, optimizer)
    save(model, optimizer)


def trained(
    read: Read, make: Callable[[], Schedule | str], num_steps: int, world_size: int
) -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, schedule=make())
        read(model, optimizer)  # before training ranks are equal
        for step in range(num_steps):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step, 4)).backward()
            optimizer.step()
        read(model, optimizer)
        read(model, optimizer)
        optimizer.close()
        evaluate(model, None)

    run_ranks(rank_main, world_size)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("read", [evaluate, save, save_within])
def test_reading_one_rank_s_model_warns_once_on_each_rank(name: str, read: Read) -> None:
    with pytest.warns(ResultWarning, match=r"middle of a block(.|\n)*optimizer.flush\(\)") as seen:
        trained(read, SCHEDULES[name], 3, 2)
    assert sorted(str(each.message)[:11] for each in seen) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("read", [average, finetune, checkpoint, flushed])
def test_what_belongs_to_training_or_is_flushed_does_not_warn(name: str, read: Read) -> None:
    trained(read, SCHEDULES[name], 3, 2)


@pytest.mark.parametrize(
    ("make", "num_steps", "world_size"),
    [
        (SCHEDULES["periodic_average"], 4, 2),
        (SCHEDULES["periodic_average"], 8, 2),
        (SCHEDULES["diloco"], 3, 1),
        (lambda: "every_step", 3, 2),
        (lambda: "double_buffering", 3, 2),
    ],
    ids=["end of a block", "end of the second", "one rank", "every_step", "double_buffering"],
)
@pytest.mark.parametrize("read", [evaluate, save])
def test_models_that_are_equal_do_not_warn(read: Read, make, num_steps, world_size) -> None:
    trained(read, make, num_steps, world_size)


def test_ranks_of_one_node_are_one_worker() -> None:
    trained(evaluate, lambda: PeriodicAverage(BLOCK, intra_node="every_step"), 3, 2)


def test_a_script_that_ends_by_saving(monkeypatch) -> None:
    """Nothing comes after it: no step, and it may not close the optimizer."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(partial(*call)))

    def rank_main(comm):
        model, optimizer = wrap(comm, schedule=PeriodicAverage(BLOCK))
        loss_of(model, batch(comm.rank, 0, 4)).backward()
        optimizer.step()
        save(model, optimizer)

    run_ranks(rank_main, 2)
    with pytest.warns(ResultWarning, match="saved in the middle of a block") as seen:
        _ = [call() for call in at_exit]
    assert len(seen) == 2


def test_a_checkpointer_with_the_optimizer_does_not_warn_and_one_without_does(tmp_path) -> None:
    def saved(*, has_optimizer: bool) -> None:
        def rank_main(comm):
            model = mlp()
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            schedule = PeriodicAverage(BLOCK)
            optimizer = create_multi_node_optimizer(sgd, comm, model, schedule=schedule)
            state = {"model": model, **({"optimizer": optimizer} if has_optimizer else {})}
            loss_of(model, batch(comm.rank, 0, 4)).backward()
            optimizer.step()
            name = str(has_optimizer)
            checkpointer = create_multi_node_checkpointer(comm, tmp_path, name, is_async=False)
            checkpointer.save(1, state)
            optimizer.close()

        run_ranks(rank_main, 2)

    saved(has_optimizer=True)
    with pytest.warns(ResultWarning, match="saved in the middle of a block"):
        saved(has_optimizer=False)
