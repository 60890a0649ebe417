"""Embeddings with sparse gradients: the rows and numbers of one process on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.limits import limit
from tests.ranks import on_ranks
from tests.unit.models import near, optimizer_of
from torchmn import create_multi_node_optimizer
from torchmn.errors import NonFiniteGradientError, UnsupportedError
from torchmn.exchange import sparse_gradients
from torchmn.exchange.sparse_gradients import mean_sparse_gradients
from torchmn.testing import run_ranks


class Words(nn.Module):
    def __init__(self, num_rows: int = 50, *, has_output: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        rows = torch.randn(num_rows, 4, generator=generator, dtype=torch.float64)
        self.words = nn.Embedding(num_rows, 4, sparse=True, _weight=rows)
        self.bag = nn.EmbeddingBag(num_rows, 4, mode="sum", sparse=True, _weight=rows.clone())
        self.out = nn.Linear(4, 2).double() if has_output else None
        if self.out is not None:
            with torch.no_grad():
                self.out.weight.copy_(torch.arange(8).view(2, 4) / 8)
                self.out.bias.zero_()

    def forward(self, x):
        hidden = self.words(x).mean(1) + self.bag(x)
        return (hidden if self.out is None else self.out(hidden)).pow(2).sum(1).mean()


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 50, (12, 3), generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


class Both:
    """SparseAdam for the embeddings and SGD for the rest, with the interface of one optimizer."""

    def __init__(self, comm, model, **options) -> None:
        sparse = [model.words.weight, model.bag.weight]
        self.optimizers = [torch.optim.SparseAdam(sparse, 0.01)]
        if model.out is not None:
            self.optimizers.append(torch.optim.SGD(model.out.parameters(), 0.1))
        if comm is not None:
            self.optimizers = [
                create_multi_node_optimizer(each, comm, model, **options)
                for each in self.optimizers
            ]

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()


def train(comm, make, num_steps=4, has_output=True):
    model = Words(has_output=has_output)
    optimizer = make(model)
    for step in range(num_steps):
        x = tokens(step)
        optimizer.zero_grad()
        model(x if comm is None else x.chunk(comm.size)[comm.rank]).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("way", ["gathered", "densified"])
def test_is_one_process_on_the_whole_batch(num_ranks, way, monkeypatch) -> None:
    if way == "densified":
        monkeypatch.setattr(sparse_gradients, "_INDEX_BYTES", 10**6)
    ways = {
        "sgd": lambda comm: train(
            comm,
            lambda model: (
                sgd(model) if comm is None else create_multi_node_optimizer(sgd(model), comm, model)
            ),
        ),
        "sparse adam": lambda comm: train(comm, lambda model: Both(comm, model)),
        "nothing dense": lambda comm: train(
            comm, lambda model: Both(comm, model), has_output=False
        ),
    }
    for name, script in ways.items():
        expected = script(None)
        for got in run_ranks(script, num_ranks):
            assert near(got, expected), name


@on_ranks(2)
def test_rows_that_no_rank_has_touched_are_not_in_the_gradient(comm) -> None:
    model = Words()
    optimizer_of(comm, model)
    x = tokens(0)
    model(x.chunk(comm.size)[comm.rank]).backward()
    grad = model.words.weight.grad
    assert grad.is_sparse
    assert set(grad.coalesce().indices()[0].tolist()) == set(x.flatten().tolist())


@on_ranks(2)
def test_ranks_without_data_and_parameters_without_gradients(comm):
    model = Words()
    optimizer = optimizer_of(comm, model, zero_fill=False)
    expected = Words()
    expected(tokens(1)).backward()
    with optimizer.join():
        for step in range(comm.rank + 1):
            optimizer.zero_grad()
            model(tokens(step)).backward()
            if step == 1:
                fresh = Words()
                fresh.load_state_dict(model.state_dict())
                fresh(tokens(1)).backward()
                got = model.words.weight.grad.to_dense()
                assert torch.allclose(got, fresh.words.weight.grad.to_dense(), atol=1e-14)
            optimizer.step()
    optimizer.zero_grad()
    model.out(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert model.words.weight.grad is None
    return [p.detach().clone() for p in model.parameters()]


@on_ranks(2)
def test_a_row_that_is_not_finite_is_refused_on_all_ranks(comm) -> None:
    model = Words()
    optimizer = optimizer_of(comm, model)
    loss = model.words(tokens(0)).sum() + model.out.weight.sum()
    (loss * (float("inf") if comm.rank == 1 else 1.0)).backward()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()


@on_ranks(2)
def test_a_sparse_gradient_of_another_layer_is_refused(comm) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(5, 2))])
    optimizer_of(comm, model)
    loss = nn.functional.embedding(torch.tensor([1, 2]), model[0], sparse=True).sum()
    with pytest.raises(UnsupportedError, match=r"is sparse .*sparse=False"):
        loss.backward()


@pytest.mark.parametrize("way", ["gathered", "densified"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_16_bits_do_not_overflow_in_the_sum(way: str, reduction: str, monkeypatch) -> None:
    """The mean of 3200 and 3200 with 256 samples each, of which the sum is beyond float16."""
    if way == "densified":
        monkeypatch.setattr(sparse_gradients, "_INDEX_BYTES", -1)

    def rank_main(comm):
        parameter = nn.Parameter(torch.zeros(4, 2, dtype=torch.float16))
        indices, rows = torch.tensor([[0, 2]]), torch.full((2, 2), 3200, dtype=torch.float16)
        parameter.grad = torch.sparse_coo_tensor(indices, rows, (4, 2), check_invariants=False)
        weight = 256.0 if reduction == "mean" else 1.0
        means = mean_sparse_gradients(
            comm, [parameter], weight, zero_fill=False, reduction=reduction
        )
        return means[parameter].to_dense()

    for found in run_ranks(rank_main, 2):
        assert found[[0, 2]].eq(3200 if reduction == "mean" else 6400).all()
        assert found[[1, 3]].eq(0).all()


@on_ranks(2, timeout_s=limit(5))
def test_a_gradient_that_is_sparse_in_two_dims_is_refused_on_all_ranks(comm) -> None:
    parameter = nn.Parameter(torch.zeros(4, 2))
    indices = torch.zeros(1 + comm.rank, 1, dtype=torch.int64)
    values = torch.ones(1, 2) if comm.rank == 0 else torch.ones(1)
    parameter.grad = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=False)
    with pytest.raises(UnsupportedError, match="on rank 1\\."):
        mean_sparse_gradients(comm, [parameter], 1.0, zero_fill=False, reduction="mean")
