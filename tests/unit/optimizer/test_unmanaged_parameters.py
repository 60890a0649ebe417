"""A gradient that no optimizer exchanges is named, once."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.unit.models import batch, loss_of, mlp
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
    with pytest.warns(RuntimeWarning, match=r"'0.weight' and 1 more has a gradient") as found:
        run_ranks(lambda comm: _train_head(comm, is_frozen=False), 2)
    assert len(found) == 1


@pytest.mark.parametrize(("is_frozen", "world_size"), [(True, 2), (False, 1)])
def test_nothing_is_said_where_nothing_differs(is_frozen: bool, world_size: int) -> None:
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
