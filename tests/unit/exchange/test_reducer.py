"""Which gradients are exchanged, and when they leave."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.limits import limit
from tests.ranks import on_ranks
from tests.unit.models import (
    batch,
    equal,
    fill,
    grads,
    loss_of,
    mean_grads,
    mlp,
    near,
    sgd,
    values,
    wrap,
)
from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.testing import run_ranks

WORLDS = [1, 2, 3, 4]
ROUTES = ["naive", "flat", "hierarchical"]


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_accumulation_with_no_sync_is_exact_and_sends_once(world_size: int, name: str) -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm)
        num_before = len(comm.flight_recorder.entries())
        with optimizer.no_sync():
            for step in range(2):
                loss_of(model, batch(comm.rank, step)).backward()
        assert len(comm.flight_recorder.entries()) == num_before
        loss_of(model, batch(comm.rank, 2)).backward()
        steps = [mean_grads(model, range(comm.size), step) for step in range(3)]
        assert near(grads(model), [sum(column) for column in zip(*steps, strict=True)])
        return grads(model)

    results = run_ranks(rank_main, world_size, name=name)
    for result in results:
        assert equal(result, results[0])


def test_all_passes_under_no_sync_are_exchanged_by_step() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm)
        with optimizer.no_sync():
            loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        assert near(grads(model), expected)
        return values(model)

    expected = mean_grads(mlp(), range(2))
    assert equal(*run_ranks(rank_main, 2))


def test_hooks_never_block() -> None:
    """All hooks of rank 0 have run before rank 1 begins its backward pass."""
    rank_0_is_through = threading.Event()

    def rank_main(comm):
        comm.route.bucket_bytes = 1
        model = mlp()
        create_multi_node_optimizer(sgd(model), comm, model)
        loss = loss_of(model, batch(comm.rank, 0))
        if comm.rank == 0:
            # These come after ours; all gradients of the model have been made when all have run.
            arrived: list[int] = []

            def note(parameter: torch.Tensor) -> None:
                arrived.append(len(arrived))
                if len(arrived) == 4:
                    rank_0_is_through.set()

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(note)
        else:
            assert rank_0_is_through.wait(timeout=limit(10)), "a hook of rank 0 waits for rank 1"
        loss.backward()
        assert near(grads(model), mean_grads(model, range(2)))
        buckets = {e.bucket for e in comm.flight_recorder.entries() if e.step == 0}
        assert buckets == {0, 1, 2, 3}

    run_ranks(rank_main, 2, name="hierarchical")


@pytest.mark.parametrize(
    ("route", "num_ranks", "expected"),
    [
        ("hierarchical", 2, [1, 2, 1]),  # layers in each bucket: at least 256 and 512 KiB
        ("hierarchical", 3, [2, 2]),  # 384 KiB
        ("two_dimensional", 4, [2, 2]),
        ("flat", 2, [4]),
    ],
)
def test_few_gradients_are_exchanged_during_backward_too(route, num_ranks, expected) -> None:
    """Such as those of adapters; by sizes alone, so that each run and each rank has the same."""

    def rank_main(comm):
        model = fill(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]))
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        buckets = optimizer.reducer.exchange.filling.buckets
        under_way: list[bool] = []
        model[0].weight.register_hook(
            lambda _: under_way.extend(bucket.work is not None for bucket in buckets)
        )
        for step in range(2):
            optimizer.zero_grad()
            data = torch.Generator().manual_seed(10 * step + comm.rank)
            model(torch.rand(2, 256, generator=data)).sum().backward()
            optimizer.step()
        num_started = len(expected) - 1
        assert under_way == 2 * [*[True] * num_started, False]
        assert [len(bucket.slots) // 2 for bucket in buckets] == expected
        return values(model)

    topology = Topology.blocks([1] * num_ranks)
    ranks = [
        result
        for _ in range(2)
        for result in run_ranks(rank_main, num_ranks, name=route, topology=topology)
    ]
    assert all(equal(result, ranks[0]) for result in ranks)


def test_buckets_leave_in_one_order_whatever_the_order_of_gradients() -> None:
    """Rank 1 uses the layers in another order, and one bucket is full early."""

    def rank_main(comm):
        comm.route.bucket_bytes = 1
        layers = nn.ModuleList([nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)])
        fill(layers)
        optimizer = create_multi_node_optimizer(sgd(layers), comm, layers)
        x = torch.ones(2, 3, dtype=torch.float64)
        order = range(4) if comm.rank == 0 else (2, 0, 3, 1)
        for i in order:
            x = layers[i](x).tanh()
        x.sum().backward()
        optimizer.step()
        return [e.bucket for e in comm.flight_recorder.entries() if e.step == 0], grads(layers)

    (order_0, grads_0), (order_1, grads_1) = run_ranks(rank_main, 2, name="hierarchical")
    assert order_0 == order_1
    assert [b for i, b in enumerate(order_0) if b not in order_0[:i]] == list(range(8))
    assert equal(grads_0, grads_1)


@on_ranks(2, name="hierarchical")
def test_a_model_without_anything_to_train(comm) -> None:
    model = mlp().requires_grad_(False)
    optimizer = create_multi_node_optimizer(sgd(model), comm, model)
    before = values(model)
    optimizer.step()
    assert equal(values(model), before)
    model.requires_grad_(True)
    loss_of(model, batch(comm.rank, 0)).backward()
    assert near(grads(model), mean_grads(model, range(comm.size)))
