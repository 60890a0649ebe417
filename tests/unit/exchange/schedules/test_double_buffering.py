"""Gradients are applied exactly one step late, and none is lost."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.limits import limit
from tests.ranks import on_ranks
from tests.unit.models import (
    batch,
    equal,
    local_grads,
    loss_of,
    mlp,
    near,
    optimizer_of,
    set_grads,
    train,
    values,
    wrap,
)
from torchmn import create_multi_node_optimizer
from torchmn.errors import UnsupportedError, UsageError
from torchmn.testing import run_ranks


def test_the_exchange_runs_on_after_the_step() -> None:
    """Rank 0 ends its backward pass and its step before rank 1 has begun its own."""
    rank_0_has_stepped = threading.Event()

    def rank_main(comm):
        model, optimizer = wrap(comm, double_buffering=True)
        if comm.rank == 1:
            assert rank_0_has_stepped.wait(timeout=limit(10)), "step() of rank 0 waits for rank 1"
        train(model, optimizer, comm.rank, [0])
        rank_0_has_stepped.set()
        train(model, optimizer, comm.rank, [1, 2])
        optimizer.flush()
        return values(model)

    assert equal(*run_ranks(rank_main, 2))


@on_ranks(2)
def test_a_pending_gradient_is_not_lost_to_another_schedule(comm) -> None:
    model, optimizer = wrap(comm, double_buffering=True)
    train(model, optimizer, comm.rank, range(2))
    late = optimizer.state_dict()
    plain = optimizer_of(comm, model)
    with pytest.raises(UsageError, match=r"'double_buffering'.*'every_step' would lose.*flush"):
        plain.load_state_dict(late)
    optimizer.flush()
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    wrong = {**late, "torchmn": {**late["torchmn"], "pending": {"x": torch.ones(1)}}}
    with pytest.raises(UsageError, match=r"of other parameters; they differ in \['0.bias'"):
        optimizer.load_state_dict(wrong)


@on_ranks(2)
def test_two_backward_passes_are_refused_outside_no_sync(comm) -> None:
    model, _ = wrap(comm, double_buffering=True)
    loss_of(model, batch(comm.rank, 0)).backward()
    with pytest.raises(UnsupportedError, match=r"Two backward passes.*no_sync\(\)"):
        loss_of(model, batch(comm.rank, 1)).backward()


@on_ranks(2)
def test_flush_between_backward_and_step_applies_both(comm) -> None:
    model, optimizer = wrap(comm, double_buffering=True)
    train(model, optimizer, comm.rank, [0])
    loss_of(model, batch(comm.rank, 1)).backward()
    optimizer.flush()
    twin, other = wrap(comm, double_buffering=True)
    train(twin, other, comm.rank, [0, 1])
    other.flush()
    assert equal(values(model), values(twin))


@on_ranks(2)
def test_a_frozen_parameter_is_not_moved_by_a_late_gradient(comm):
    model = mlp()
    optimizer = create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.1), comm, model, double_buffering=True
    )
    train(model, optimizer, comm.rank, range(2))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    train(model, optimizer, comm.rank, range(2, 4))
    optimizer.flush()
    assert torch.equal(model[0].weight, before)
    return values(model)


@on_ranks(2)
def test_the_first_backward_pass_leaves_no_gradients_sparse_ones_neither(comm) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = create_multi_node_optimizer(inner, comm, model, schedule="double_buffering")
    model(torch.tensor([comm.rank])).sum().backward()
    assert [parameter.grad for parameter in model.parameters()] == [None] * 3
    optimizer.close()


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(1, 2)
def test_a_model_is_converted_while_a_mean_is_late(comm, as_view: bool) -> None:
    model, reference = mlp(), mlp()
    optimizer = create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        comm,
        model,
        double_buffering=True,
        gradient_as_bucket_view=as_view,
    )
    sgd, late = torch.optim.SGD(reference.parameters(), 0.1), None
    dtype = torch.float64
    for step in range(5):
        if step == 3:
            dtype = torch.float32
            model.to(dtype)
            reference.to(dtype)
        parts = [local_grads(reference, batch(r, step, dtype=dtype)) for r in range(comm.size)]
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step, dtype=dtype)).backward()
        optimizer.step()
        for parameter, mean in zip(reference.parameters(), late or [], strict=False):
            parameter.grad = mean.to(dtype)
        sgd.step()
        late = [sum(column) / comm.size for column in zip(*parts, strict=True)]
    model.double()
    optimizer.flush()
    set_grads(reference.double(), [mean.double() for mean in late])
    sgd.step()
    assert near(values(model), values(reference), 1e-6)


@on_ranks(2)
def test_lbfgs_is_refused(comm) -> None:
    model = mlp()
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(UnsupportedError, match="does not support LBFGS"):
        create_multi_node_optimizer(lbfgs, comm, model, double_buffering=True)
