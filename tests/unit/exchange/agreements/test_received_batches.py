"""Batches that one rank leaves out are noticed at the next exchange, and nothing else is."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from queue import Queue
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.limits import limit
from tests.ranks import on_ranks
from tests.unit.models import loss_of, mlp, values
from torchmn import GlobalSampler, create_multi_node_optimizer, scatter_loader
from torchmn.comm import Communicator
from torchmn.errors import RankMismatchError, UsageError
from torchmn.testing import run_ranks

DIFFERENT = "the ranks exchange gradients of different batches"


class Script:
    """What the scripts below begin with."""

    def __init__(self, comm: Communicator, schedule: str, **options: Any) -> None:
        self.comm = comm
        self.model = mlp()
        inner = torch.optim.SGD(self.model.parameters(), 0.1)
        self.optimizer = create_multi_node_optimizer(
            inner, comm, self.model, schedule=schedule, **options
        )
        self.loaders = [
            scatter_loader(DataLoader(_data(seed), batch_size=6), comm) for seed in range(2)
        ]
        self.loader = self.loaders[0]

    def step(self, batch: list[torch.Tensor], num_passes: int = 1) -> None:
        self.optimizer.zero_grad()
        for _ in range(num_passes - 1):
            with self.optimizer.no_sync():
                loss_of(self.model, batch[0]).backward()
        loss_of(self.model, batch[0]).backward()
        self.optimizer.step()


def _data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(60, 5, generator=generator, dtype=torch.float64) / 10)


def _sampled(own: Script) -> DataLoader[Any]:
    sampler = GlobalSampler(60, own.comm, 6, shuffle=False)
    return scatter_loader(DataLoader(_data(0), batch_sampler=sampler), own.comm)


# ---- what one process does not do ----


def leaves_out(
    number: int, rank: int, *, epoch: int = 0, num_passes: int = 1, is_sampled: bool = False
) -> Callable[[Script], None]:
    """A local `continue`, as where a loss is NaN, or an error was caught."""

    def script(own: Script) -> None:
        for now in range(epoch + 1):
            for index, batch in enumerate(_sampled(own) if is_sampled else own.loader):
                if (now, index, own.comm.rank) != (epoch, number, rank):
                    own.step(batch, num_passes)

    return script


def a_local_continue_before_the_first_exchange_where_one_is_requested_early(own: Script) -> None:
    batches = iter(own.loader)
    held = next(batches)
    for number, batch in enumerate(batches):
        if number > 0 or own.comm.rank == 0:
            own.step(held)
        held = batch


def a_local_continue_after_a_batch_that_all_repeat(own: Script) -> None:
    for number, batch in enumerate(own.loader):
        if number == 5 and own.comm.rank == 1:
            continue
        own.step(batch)
        if number in (0, 2):
            own.step(batch)


def a_task_by_own_random_numbers(own: Script) -> None:
    draw = random.Random(own.comm.rank)
    tasks = [iter(loader) for loader in own.loaders]
    for task in tasks:  # a pass begins on all ranks together
        own.step(next(task))
    for _ in range(8):
        own.step(next(tasks[draw.randrange(2)]))


@pytest.mark.parametrize("schedule", ["every_step", "double_buffering"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(leaves_out(4, rank=1), id="a batch"),
        pytest.param(leaves_out(0, rank=1), id="the first batch"),
        pytest.param(leaves_out(3, rank=1, is_sampled=True), id="of a global sampler"),
        pytest.param(leaves_out(0, rank=0, epoch=1), id="in the second epoch"),
        pytest.param(leaves_out(3, rank=0, num_passes=2), id="before accumulating"),
        a_local_continue_before_the_first_exchange_where_one_is_requested_early,
        a_local_continue_after_a_batch_that_all_repeat,
        a_task_by_own_random_numbers,
    ],
)
def test_another_batch_on_one_rank_is_named_on_all(
    script: Callable[[Script], None], size: int, schedule: str
) -> None:
    def rank_main(comm):
        with pytest.raises(RankMismatchError, match=DIFFERENT) as caught:
            script(Script(comm, schedule))
        return str(caught.value).partition(":")[2]

    found = run_ranks(rank_main, size, timeout_s=limit(10))
    assert len(set(found)) == 1
    assert all(f"rank {rank} at batch" in found[0] for rank in range(size))


# ---- what forward has not seen on one rank ----


def accumulated_but_for_one(own: Script) -> None:
    for number, batch in enumerate(own.loader):
        if number == 5 and own.comm.rank == 1:
            continue
        if number % 4 < 3:
            with own.optimizer.no_sync():
                loss_of(own.model, batch[0]).backward()
        else:
            loss_of(own.model, batch[0]).backward()
            own.optimizer.step()
            own.optimizer.zero_grad()


def some_samples_of_equal_parts(own: Script) -> None:
    for (x,) in own.loader:
        own.step([x[x[:, 0] > 0] if own.comm.rank == 0 else x])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("script", [accumulated_but_for_one, some_samples_of_equal_parts])
def test_what_forward_has_not_seen_is_named_on_all_ranks(
    script: Callable[[Script], None], size: int
) -> None:
    def rank_main(comm):
        with pytest.raises(UsageError, match="not in proportion to the ranks' parts") as caught:
            script(Script(comm, "every_step"))
        return str(caught.value).partition(":")[2]

    found = run_ranks(rank_main, size, timeout_s=limit(10))
    assert len(set(found)) == 1
    assert all(f"rank {rank} saw" in found[0] for rank in range(size))


# ---- what scripts may do ----


def both_loaders(own: Script) -> None:
    for one, other in zip(own.loaders[0], islice(own.loaders[1], 7), strict=False):
        own.step(one)
        own.step(other)


def kept_in_a_list(own: Script) -> None:
    batches = list(own.loader)
    for number in (*range(4), *range(own.comm.rank, 10)):
        own.step(batches[number % 10])
        if number == 8:
            break
    for _ in range(own.comm.rank):  # all ranks have made the same number of steps
        own.step(batches[0])


def requested_by_a_thread(own: Script) -> None:
    """How many it has requested at an exchange is by chance; here it is one more on one rank."""
    queue: Queue[Any] = Queue()
    may_request = threading.Semaphore(1)

    def request() -> None:
        batches = iter(own.loader)
        while may_request.acquire() and (batch := next(batches, None)) is not None:
            queue.put(batch)
        queue.put(None)

    thread = threading.Thread(target=request)
    thread.start()
    number = 0
    while (batch := queue.get()) is not None:
        if number == 5 + own.comm.rank:
            may_request.release()
            while queue.empty():
                thread.join(0.001)
        own.step(batch)
        number += 1
        if number != 6 + own.comm.rank:
            may_request.release()
    thread.join()


def a_look_at_a_batch_on_rank_0(own: Script) -> None:
    """A pass over a `GlobalSampler` begins on each rank by itself."""
    loader = _sampled(own)
    for epoch in range(3):
        if own.comm.rank == 0 and epoch > 0:
            next(iter(loader))
        for batch in loader:
            own.step(batch)


def as_many_as_fill_a_step(own: Script) -> None:
    """As where sequences are packed."""
    batches = iter(own.loader)
    for number in range(5):
        several = islice(batches, 1 + (number + own.comm.rank) % 2)
        own.step([torch.cat([x for (x,) in several])])


def accumulated(own: Script) -> None:
    def grouped() -> Iterator[list[list[torch.Tensor]]]:
        batches = iter(own.loader)
        while group := list(islice(batches, 4)):  # the last one has two
            yield group

    for group in grouped():
        own.optimizer.zero_grad()
        for number, batch in enumerate(group):
            if number < len(group) - 1:
                with own.optimizer.no_sync():
                    loss_of(own.model, batch[0]).backward()
            else:
                loss_of(own.model, batch[0]).backward()
        own.optimizer.step()


def without_a_backward_pass(own: Script) -> None:
    for number, batch in enumerate(own.loader):
        if number == 4 and own.comm.rank == 1:
            own.optimizer.zero_grad()
            own.optimizer.set_weight(0)
            own.optimizer.step()
        else:
            own.step(batch)


def all_leave_some_out(own: Script) -> None:
    for number, batch in enumerate(own.loader):
        if number not in (3, 4, 7):
            own.step(batch)


def different_numbers_in_join(own: Script) -> None:
    with own.optimizer.join():
        for number, batch in enumerate(own.loader):
            if number in (3, 5) and own.comm.rank == 1:
                continue
            own.step(batch)


def a_forward_pass_that_was_repeated(own: Script) -> None:
    for number, batch in enumerate(own.loader):
        if number == 4 and own.comm.rank == 1:  # out of memory in it
            loss_of(own.model, batch[0])
            own.optimizer.zero_grad()
        own.step(batch)


@pytest.mark.parametrize("schedule", ["every_step", "double_buffering"])
@pytest.mark.parametrize(
    "script",
    [
        both_loaders,
        kept_in_a_list,
        requested_by_a_thread,
        a_look_at_a_batch_on_rank_0,
        as_many_as_fill_a_step,
        accumulated,
        without_a_backward_pass,
        all_leave_some_out,
        different_numbers_in_join,
        a_forward_pass_that_was_repeated,
    ],
)
@on_ranks(2, 3, timeout_s=limit(10))
def test_what_is_right_is_not_refused(comm, script: Callable[[Script], None], schedule: str):
    """The tests make an error of every warning. Others are in test_loops_over_loaders.py."""
    # Parts of different batches have no common weights.
    has_others = script in (different_numbers_in_join, as_many_as_fill_a_step)
    options = {"weight": "rank"} if has_others else {}
    own = Script(comm, schedule, **options)
    script(own)
    own.optimizer.flush()
    return values(own.model)
