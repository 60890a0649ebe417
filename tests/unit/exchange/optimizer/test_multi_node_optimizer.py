"""The wrapper is an optimizer as torch's own: schedulers, states, hooks, scalers work on it."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn

from tests.limits import limit
from tests.ranks import on_ranks
from tests.unit.models import (
    batch,
    equal,
    grads,
    local_grads,
    loss_of,
    mean_grads,
    mlp,
    near,
    sgd,
    train,
    values,
    wrap,
)
from torchmn import create_multi_node_optimizer
from torchmn.errors import CommunicationError, RankMismatchError, UnsupportedError, UsageError
from torchmn.testing import run_ranks

SCHEDULES = ["every_step", "double_buffering"]


@on_ranks(2)
def test_shares_groups_state_and_defaults_with_the_inner_one(comm) -> None:
    model = mlp()
    inner = sgd(model)
    optimizer = create_multi_node_optimizer(inner, comm, model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults is inner.defaults
    assert optimizer.state is inner.state
    train(model, optimizer, comm.rank, range(2))
    optimizer.load_state_dict(optimizer.state_dict())  # replaces both in the inner one
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    optimizer.param_groups[0]["lr"] = 0.25
    assert inner.param_groups[0]["lr"] == 0.25
    inner.note = "mine"  # what only the inner optimizer has is found through ours
    assert optimizer.note == "mine"
    with pytest.raises(AttributeError):
        _ = optimizer.nothing_of_the_kind
    text = repr(optimizer)
    assert "every_step" in text
    assert f"rank {comm.rank} of 2" in text
    assert "SGD" in text


@on_ranks(1, 2)
def test_copies_and_pickles_are_refused(comm) -> None:
    model, optimizer = wrap(comm)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match=r"cannot be copied.*state_dict\(\)"):
            duplicate(optimizer)
    assert copy.deepcopy(optimizer.inner).param_groups[0]["lr"] == 0.1


@on_ranks(1, 2)
def test_grad_scaler_is_refused_where_gradients_are_late(comm) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = create_multi_node_optimizer(sgd(model), comm, model, double_buffering=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batch(0, 0, dtype=torch.float32))).backward()
    with pytest.raises(UnsupportedError, match=r"GradScaler and double_buffering.*bfloat16"):
        scaler.step(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(optimizer)  # switched off it only steps


class Scaled(torch.optim.SGD):
    """Options that are attributes, one of which has the name of one of the wrapper."""

    scale, schedule = 1.0, "none"

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad *= self.scale
        return super().step(closure)


def test_an_attribute_that_a_script_sets_is_that_of_the_inner_one() -> None:
    def steps(model, optimizer, rank):
        for step in range(3):
            train(model, optimizer, rank, [step])
            optimizer.scale *= 0.5
            optimizer.note = "of the script"
        return values(model)

    def rank_main(comm):
        model = mlp()
        inner = Scaled(model.parameters(), lr=0.1)
        optimizer = create_multi_node_optimizer(inner, comm, model)
        found = steps(model, optimizer, 0)
        assert inner.scale == 0.125
        assert inner.schedule == "none"
        assert not hasattr(inner, "note")
        return found

    model = mlp()
    expected = steps(model, Scaled(model.parameters(), lr=0.1), 0)
    for size in (1, 2):
        assert near(run_ranks(rank_main, size)[0], expected)


class WithoutClosure(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize("schedule", [*SCHEDULES, "periodic_average"])
def test_a_step_that_takes_no_closure(schedule: str) -> None:
    def rank_main(comm, kind):
        model = mlp()
        inner = kind(model.parameters(), lr=0.1)
        optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule)
        train(model, optimizer, comm.rank, range(3))
        optimizer.flush()
        return values(model)

    for size in (1, 2):
        expected = run_ranks(partial(rank_main, kind=torch.optim.SGD), size)[0]
        assert near(run_ranks(partial(rank_main, kind=WithoutClosure), size)[0], expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(3, name="hierarchical")
def test_a_group_added_later_is_broadcast_and_exchanged(comm, schedule: str):
    model = nn.Sequential(mlp(), mlp())[:1]
    optimizer = create_multi_node_optimizer(sgd(model), comm, model, schedule=schedule)
    train(model, optimizer, comm.rank, range(2))
    model.append(nn.Linear(3, 2, dtype=torch.float64))
    with torch.no_grad():
        model[1].weight.fill_(comm.rank + 1.0)  # other values on every rank
        model[1].bias.zero_()
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.01})
    assert float(model[1].weight[0, 0].detach()) == 1.0
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.1, 0.01]
    train(model, optimizer, comm.rank, range(2, 5))
    optimizer.flush()
    assert not torch.equal(model[1].weight, torch.ones(2, 3, dtype=torch.float64))
    return values(model)


@on_ranks(2)
def test_a_group_that_is_not_in_the_model_is_refused_and_not_added(comm) -> None:
    model, optimizer = wrap(comm)
    with pytest.raises(UsageError, match=r"group 1, shape \[2\], is not in the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, comm.rank, range(2))


@on_ranks(2)
def test_a_group_takes_parameters_over_from_an_older_optimizer(comm):
    model = nn.Sequential(mlp(), nn.Linear(3, 2, dtype=torch.float64))
    older = create_multi_node_optimizer(sgd(model[0]), comm, model)
    newer = create_multi_node_optimizer(sgd(model[1]), comm, model)
    newer.add_param_group({"params": model[0].parameters()})
    train(model, newer, comm.rank, range(2))  # each gradient is exchanged once: no warning
    with pytest.raises(UsageError, match="gave its parameters to"):
        older.step()
    return values(model)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "periodic_average"])
@on_ranks(2)
def test_parameters_that_a_script_puts_into_a_group_are_those_of_rank_0(comm, schedule: str):
    model = nn.Sequential(mlp())
    optimizer = create_multi_node_optimizer(sgd(model), comm, model, schedule=schedule)
    train(model, optimizer, comm.rank, range(2))
    model.append(nn.Linear(3, 2, dtype=torch.float64))
    nn.init.constant_(model[1].weight, comm.rank + 1.0)
    optimizer.param_groups[0]["params"].extend(model[1].parameters())
    if optimizer.schedule.traits.replica_consistency != "per_step":
        with pytest.raises(UnsupportedError, match=r"call flush\(\) and close\(\)"):
            optimizer.zero_grad()
        return []
    optimizer.zero_grad()
    assert torch.equal(model[1].weight, torch.ones(2, 3, dtype=torch.float64))
    train(model, optimizer, comm.rank, range(2, 4))
    optimizer.flush()
    return values(model)


@pytest.mark.parametrize("name", ["flat", "hierarchical"])
@pytest.mark.parametrize("schedule", ["every_step", "double_buffering"])
@pytest.mark.parametrize("codec", [None, "1bit"])
def test_a_backward_that_raises_on_all_ranks_may_be_repeated(name: str, schedule, codec) -> None:
    def rank_main(comm, *, raises):
        comm.route.bucket_bytes = 1
        model, optimizer = wrap(comm, schedule=schedule, codec=codec)
        for step in range(6):
            optimizer.zero_grad()
            if raises and step % 2:
                with pytest.raises(ValueError, match="broken layer"):
                    loss_of(nn.Sequential(Raises(), *model), batch(comm.rank, 0)).backward()
                with pytest.raises(UsageError, match=r"raised an exception.*zero_grad\(\)"):
                    optimizer.step()
                optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
        optimizer.flush()
        return [p.detach().clone() for p in model.parameters()]

    found = run_ranks(partial(rank_main, raises=True), 2, name=name)
    expected = run_ranks(partial(rank_main, raises=False), 2, name=name)
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert torch.equal(mine, theirs)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("schedule", ["every_step", "double_buffering"])
@on_ranks(2, 3, timeout_s=limit(5))
def test_a_backward_that_raises_and_is_repeated_on_one_rank_alone_is_named_on_all(
    comm, schedule: str
) -> None:
    """As after out of memory on one rank. Where there is one set of buckets all may continue."""
    comm.route.bucket_bytes = 1
    model, optimizer = wrap(comm, schedule=schedule)
    if comm.rank == 1:
        with pytest.raises(ValueError, match="broken layer"):
            loss_of(nn.Sequential(Raises(), *model), batch(comm.rank, 0)).backward()
        optimizer.zero_grad()
    named = r"rank 1 raised an exception in its backward"

    def two_steps() -> None:  # where means come a step late the second one finds it
        loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        loss_of(model, batch(comm.rank, 1)).backward()

    with pytest.raises(RankMismatchError, match=named):
        two_steps()
    if schedule == "double_buffering":
        with pytest.raises(CommunicationError, match=named):
            optimizer.step()
        return
    optimizer.zero_grad()
    loss_of(model, batch(comm.rank, 0)).backward()
    assert near(grads(model), mean_grads(model, range(comm.size)))


def test_a_backward_that_raises_on_one_rank_ends_the_others_in_time() -> None:
    def rank_main(comm):
        comm.route.bucket_bytes = 1
        model, optimizer = wrap(comm)
        layers = nn.Sequential(Raises(), *model) if comm.rank == 0 else model
        error = ValueError if comm.rank == 0 else CommunicationError
        with pytest.raises(error):
            loss_of(layers, batch(comm.rank, 0)).backward()
        with pytest.raises((UsageError, CommunicationError)) as caught:
            optimizer.step()
        return str(caught.value)

    died, waited = run_ranks(rank_main, 2, name="hierarchical", timeout_s=3)
    assert "raised an exception" in died
    assert "rank 1 of 2" in waited
    assert re.search("within 3 s|closed its connection", waited), waited


class Raises(nn.Module):
    """Passes a value on and raises in backward, before the gradient of what is below is made."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return _Raise.apply(x * self.scale)


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("broken layer")


@on_ranks(2)
def test_use_after_finalize_is_an_error_with_the_cure(comm) -> None:
    model = mlp()
    create_multi_node_optimizer(sgd(model), comm, model)
    comm.finalize()
    with pytest.raises(CommunicationError, match="was finalized. Create a new one"):
        loss_of(model, batch(comm.rank, 0)).backward()


@on_ranks(2)
def test_close_lets_go_of_the_model(comm):
    model, optimizer = wrap(comm, weight="samples")
    train(model, optimizer, comm.rank, range(2))
    optimizer.close()
    expected = local_grads(model, batch(comm.rank, 2))
    optimizer.zero_grad()
    loss_of(model, batch(comm.rank, 2)).backward()
    assert equal(grads(model), expected)  # of this rank alone
    again = create_multi_node_optimizer(sgd(model), comm, model)
    train(model, again, comm.rank, range(3))
    assert again.reducer.step == 3
    return values(model)
