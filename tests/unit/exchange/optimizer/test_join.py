"""Loops of different lengths: a mean is over the ranks that still have data."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import on_ranks
from tests.unit.models import batch, equal, loss_of, mlp, train, values
from torchmn import create_multi_node_optimizer
from torchmn.errors import CommunicationError, UnsupportedError
from torchmn.testing import run_ranks

INNER = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 0.01),
}
SCHEDULES = ["every_step", "double_buffering"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_epoch_after_the_other(schedule: str) -> None:
    """The rank that ran longest so far is not the one that runs longest now."""
    epochs = [[6, 1, 2], [1, 3, 2], [0, 2, 4]]

    def rank_main(comm):
        model = mlp()
        inner = INNER["momentum"](model)
        optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule)
        for epoch, lengths in enumerate(epochs):
            with optimizer.join():
                for step in range(lengths[comm.rank]):
                    optimizer.zero_grad()
                    loss_of(model, batch(comm.rank, 10 * epoch + step)).backward()
                    optimizer.step()
        assert optimizer.reducer.step == sum(map(max, epochs))
        return values(model)

    results = run_ranks(rank_main, 3)
    for result in results:
        assert equal(result, results[0])


def test_buffers_are_of_the_rank_that_ran_to_the_end() -> None:
    def rank_main(comm):
        model = torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(3, dtype=torch.float64))
        optimizer = create_multi_node_optimizer(INNER["adam"](model), comm, model)
        with optimizer.join():
            train(model, optimizer, comm.rank, range(1 + comm.rank))
        return int(model[1].num_batches_tracked), model[1].running_mean.clone()

    (count_0, mean_0), (count_1, mean_1) = run_ranks(rank_main, 2)
    assert count_0 == count_1 == 2
    assert torch.equal(mean_0, mean_1)


@on_ranks(2)
def test_a_closure_inside_join_is_refused(comm) -> None:
    model = mlp()
    optimizer = create_multi_node_optimizer(INNER["adam"](model), comm, model)
    with pytest.raises(UnsupportedError, match=r"inside join\(\)"), optimizer.join():
        optimizer.step(lambda: 0.0)


@on_ranks(2, timeout_s=1)
def test_an_error_in_one_loop_ends_the_others_in_time(comm) -> None:
    model = mlp()
    optimizer = create_multi_node_optimizer(INNER["adam"](model), comm, model)

    def loop() -> None:
        with optimizer.join():
            for step in range(3):
                if comm.rank == 1 and step == 1:
                    raise KeyError("no such sample")
                train(model, optimizer, comm.rank, [step])

    with pytest.raises(KeyError if comm.rank == 1 else CommunicationError):
        loop()
