"""Parameters that require a gradient but that no optimizer trains."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.unit.models import batch, local_grads, loss_of, mlp, near
from torchmn import create_multi_node_optimizer
from torchmn.testing import run_ranks


def _train_head(comm, *, is_frozen: bool) -> None:
    model = mlp()
    model[0].requires_grad_(not is_frozen)
    inner = torch.optim.SGD(model[2].parameters(), 0.1)
    optimizer = create_multi_node_optimizer(inner, comm, model)
    for step in range(2):
        loss_of(model, batch(comm.rank, step)).backward()
        optimizer.step()


def test_it_is_named_once() -> None:
    with pytest.warns(RuntimeWarning, match=r"'0.weight' and 1 more require a gradient") as found:
        run_ranks(lambda comm: _train_head(comm, is_frozen=False), 2)
    assert len(found) == 1


@pytest.mark.filterwarnings("ignore:(.|\\n)*no multi-node optimizer trains them")
@pytest.mark.parametrize("schedule", ["every_step", "double_buffering", "every_step_next_forward"])
def test_they_are_means_though_a_rank_has_no_data(schedule: str) -> None:
    def rank_main(comm) -> None:
        model = mlp()
        inner = torch.optim.SGD(model[2].parameters(), 0.1)
        optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule)
        with optimizer.join():
            for step in range(comm.rank * 3):
                model.zero_grad()
                loss_of(model, batch(comm.rank, step)).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                assert norm > 0 or (schedule == "double_buffering" and step == 0)
                optimizer.step()

    run_ranks(rank_main, 2)


@pytest.mark.filterwarnings("ignore:(.|\\n)*no multi-node optimizer trains them")
def test_a_newer_optimizer_takes_them_over() -> None:
    def rank_main(comm) -> None:
        model = mlp()
        head = create_multi_node_optimizer(torch.optim.SGD(model[2].parameters(), 0.1), comm, model)
        loss_of(model, batch(comm.rank, 0)).backward()
        head.step()
        assert {name for name, _ in head.reducer.parameters.untrained} == {"0.weight", "0.bias"}
        expected = comm.allreduce(local_grads(model, batch(comm.rank, 1))[0], "mean")
        body = create_multi_node_optimizer(torch.optim.SGD(model[0].parameters(), 0.1), comm, model)
        assert not head.reducer.parameters.untrained
        model.zero_grad()
        loss_of(model, batch(comm.rank, 1)).backward()
        assert near([model[0].weight.grad], [expected])
        head.step()
        body.step()

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(("is_frozen", "world_size"), [(True, 2), (False, 1)])
def test_there_is_no_warning_where_nothing_is_exchanged_for_it(
    is_frozen: bool, world_size: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(lambda comm: _train_head(comm, is_frozen=is_frozen), world_size)


def test_parameters_of_another_optimizer_are_exchanged() -> None:
    def rank_main(comm) -> None:
        model = mlp()
        optimizers = [
            create_multi_node_optimizer(torch.optim.SGD(part.parameters(), 0.1), comm, model)
            for part in (model[0], model[2])
        ]
        loss_of(model, batch(comm.rank, 0)).backward()
        for optimizer in optimizers:
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(rank_main, 2)
