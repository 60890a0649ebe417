"""Every ``p.grad`` is memory of its own: kept, copied and saved like any gradient."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from tests.unit.models import batch, equal, grads, loss_of, near, wrap
from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.exchange.gradient_memory import GradientMemory
from torchmn.testing import run_ranks

HOLDERS = {
    "the tensor": lambda g: g,
    "detach()": lambda g: g.detach(),
    "data": lambda g: g.data,
    "view": lambda g: g.view(-1),
    "a row": lambda g: g[0],
    "numpy()": lambda g: g.numpy(),
    "a graph": lambda g: (g * nn.Parameter(torch.ones(()))).sum(),
}


class TestReuse:
    def test_unreferenced_memory_is_used_again(self) -> None:
        parameter, memory = nn.Parameter(torch.zeros(3, 2)), GradientMemory()
        addresses = set()
        for value in range(4):
            memory.set_all([parameter], [torch.full((3, 2), float(value))])
            assert parameter.grad.unique().tolist() == [value]
            addresses.add(parameter.grad.data_ptr())
            parameter.grad = None
        assert len(addresses) == 1

    @pytest.mark.parametrize("holder", HOLDERS)
    def test_referenced_memory_keeps_its_values(self, holder: str) -> None:
        parameter, memory = nn.Parameter(torch.zeros(3, 2)), GradientMemory()
        memory.set_all([parameter], [torch.ones(3, 2)])
        address = parameter.grad.data_ptr()
        held = HOLDERS[holder](parameter.grad)
        parameter.grad = None
        memory.set_all([parameter], [torch.full((3, 2), 2.0)])
        assert parameter.grad.data_ptr() != address
        values = held.grad_fn.next_functions if holder == "a graph" else held
        assert holder == "a graph" or bool((torch.as_tensor(values) == 1).all())
        del held, values

    def test_memory_that_the_script_gave_a_gradient_is_the_scripts(self) -> None:
        parameter, memory = nn.Parameter(torch.zeros(2)), GradientMemory()
        memory.set_all([parameter], [torch.ones(2)])
        mine = torch.full((2,), 3.0)
        parameter.grad.data = mine
        parameter.grad = None
        memory.set_all([parameter], [torch.zeros(2)])
        assert mine.tolist() == [3.0, 3.0]
        assert parameter.grad.tolist() == [0.0, 0.0]

    def test_a_build_that_cannot_count_shares_nothing(self, monkeypatch) -> None:
        monkeypatch.setattr("torchmn.exchange.gradient_memory.CAN_COUNT", False)
        parameter, memory = nn.Parameter(torch.zeros(2)), GradientMemory()
        memory.set_all([parameter], [torch.ones(2)])
        held = parameter.grad.detach()
        parameter.grad = None
        memory.set_all([parameter], [torch.zeros(2)])
        assert held.tolist() == [1.0, 1.0]


def test_views_of_the_bucket_are_overwritten_by_the_next_pass() -> None:
    def rank_main(comm, *, is_view):
        model, optimizer = wrap(comm, gradient_as_bucket_view=is_view)
        held = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            held.append(model[0].weight.grad)
            optimizer.step()
        addresses = {gradient.data_ptr() for gradient in held}
        assert len(addresses) == (1 if is_view else 3)
        return [p.detach().clone() for p in model.parameters()]

    views = run_ranks(lambda comm: rank_main(comm, is_view=True), 2)
    copies = run_ranks(lambda comm: rank_main(comm, is_view=False), 2)
    assert equal(views[0], copies[0])


@pytest.mark.parametrize("holder", HOLDERS)
@on_ranks(2)
def test_a_bucket_in_use_by_the_script_gets_new_memory(comm, holder: str):
    """And only then: without it the same memory holds every mean, with no copy."""
    model, optimizer = wrap(comm)
    addresses, held, copy = [], None, None
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step)).backward()
        gradient = model[0].weight.grad
        addresses.append(gradient.data_ptr())
        if step == 2 and comm.rank == 0:
            held, copy = HOLDERS[holder](gradient), gradient.clone()
        del gradient
        optimizer.step()
    if held is not None and holder not in ("a graph", "a row"):
        assert torch.equal(torch.as_tensor(held).view(-1), copy.view(-1))
    assert len(set(addresses)) == (2 if comm.rank == 0 else 1)
    return [p.detach().clone() for p in model.parameters()]


def test_gradients_that_were_not_cleared_survive_a_move() -> None:
    """One gradient is kept, the others accumulate: as in one process."""

    def rank_main(comm):
        model, optimizer = wrap(comm)
        loss_of(model, batch(0, 0)).backward()
        kept = model[0].weight.grad
        before = kept.clone()
        model[0].weight.grad = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more than one backward pass per step
            loss_of(model, batch(0, 1)).backward()
        assert torch.equal(kept, before)
        del optimizer
        return grads(model)

    assert near(run_ranks(rank_main, 2)[0], run_ranks(rank_main, 1)[0])


@pytest.mark.parametrize("route", ["flat", "single_node"])
def test_views_of_buckets_outlast_another_layout(route: str) -> None:
    """In memory that the ranks of a node share as well."""
    inputs = torch.randn(4, 4, 64, generator=torch.Generator().manual_seed(1)).double()
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)).double()

    def train(comm):
        model = copy.deepcopy(made)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if comm is not None:
            optimizer = create_multi_node_optimizer(
                optimizer, comm, model, gradient_as_bucket_view=True
            )
        for step, x in enumerate(inputs):
            if step == 2:
                model[0].requires_grad_(False)
                model[0].weight.grad = model[0].bias.grad = None
            optimizer.zero_grad(set_to_none=False)
            part = x if comm is None else x.chunk(comm.size)[comm.rank]
            model(part).pow(2).mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    expected = train(None)
    for got in run_ranks(train, 2, name=route, topology=Topology.blocks([2])):
        assert near(got, expected)
