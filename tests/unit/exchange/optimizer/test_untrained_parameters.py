"""Parameters that require a gradient but that no optimizer trains."""

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from tests.unit.models import batch, equal, fill, local_grads, loss_of, mlp, near, values
from torchmn import create_multi_node_optimizer
from torchmn.errors import PerformanceWarning
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
    with pytest.warns(
        PerformanceWarning, match=r"'0.weight' and 1 more require a gradient"
    ) as found:
        run_ranks(lambda comm: _train_head(comm, is_frozen=False), 2)
    assert len(found) == 1


@pytest.mark.filterwarnings("ignore:(.|\\n)*no multi-node optimizer trains them")
@pytest.mark.parametrize("schedule", ["every_step", "double_buffering"])
@on_ranks(2)
def test_they_are_means_though_a_rank_has_no_data(comm, schedule: str) -> None:
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


@pytest.mark.filterwarnings("ignore:(.|\\n)*no multi-node optimizer trains them")
@on_ranks(2)
def test_a_newer_optimizer_takes_them_over(comm) -> None:
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


@pytest.mark.parametrize(("is_frozen", "world_size"), [(True, 2), (False, 1)])
def test_there_is_no_warning_where_nothing_is_exchanged_for_it(
    is_frozen: bool, world_size: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(lambda comm: _train_head(comm, is_frozen=is_frozen), world_size)


@pytest.mark.filterwarnings("ignore:(.|\\n)*no multi-node optimizer trains them")
@pytest.mark.parametrize(
    ("schedule", "codec"),
    [("double_buffering", None), ("double_buffering", "int4"), ("every_step", "int4")],
)
@on_ranks(2)
def test_a_resumed_run_is_bit_identical(comm, schedule: str, codec: str | None) -> None:
    def build():
        model = fill(nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 7)))
        sgd = torch.optim.SGD(model[2].parameters(), 0.1)
        return model, create_multi_node_optimizer(sgd, comm, model, schedule=schedule, codec=codec)

    def train(model, optimizer, steps) -> None:
        for step in steps:
            model.zero_grad()
            loss_of(model, batch(comm.rank, step, dtype=torch.float32)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    model, optimizer = build()
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(3, 6))
    again, resumed = build()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(again, resumed, range(3, 6))
    assert equal(values(again), values(model))
