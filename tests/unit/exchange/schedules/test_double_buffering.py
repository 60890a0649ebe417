"""Gradients are applied exactly one step late, and none is lost."""

from __future__ import annotations

import io
import threading

import pytest
import torch
from torch import nn

from tests.limits import limit
from tests.unit.models import batch, equal, grads, local_grads, loss_of, mlp, near, values
from torchmn import create_multi_node_optimizer
from torchmn.errors import UnsupportedError, UsageError
from torchmn.testing import run_ranks

WORLDS = [1, 2, 3]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def make(comm, model, **options):
    return create_multi_node_optimizer(adam(model), comm, model, double_buffering=True, **options)


def train(model, optimizer, rank, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["flat", "hierarchical"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_staleness_is_exactly_one(world_size: int, name: str) -> None:
    """g_k is of the parameters after k-2 updates, and update k-1 applies g_{k-1}'s mean."""

    def rank_main(comm):
        comm.bucket_bytes = 100
        model = mlp()
        optimizer = make(comm, model)
        num_steps = []
        optimizer.register_step_post_hook(lambda *_: num_steps.append(1))
        history = []
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            assert len(num_steps) == max(0, step - 1)
            if step == 0:
                assert grads(model) == [None] * 4
            optimizer.step()
            history.append(values(model))
        assert len(num_steps) == 4
        optimizer.flush()
        assert len(num_steps) == 5
        optimizer.flush()  # nothing is left
        assert len(num_steps) == 5
        return [*history, values(model)]

    model = mlp()
    inner = adam(model)
    pending = None
    expected = []
    for step in range(6):
        mean = None
        if step < 5:
            parts = [local_grads(model, batch(rank, step)) for rank in range(world_size)]
            mean = [sum(column) / world_size for column in zip(*parts, strict=True)]
        if pending is not None:
            for parameter, part in zip(model.parameters(), pending, strict=True):
                parameter.grad = part
            inner.step()
        pending = mean
        expected.append(values(model))
    for history in run_ranks(rank_main, world_size, name=name):
        for mine, theirs in zip(history, expected, strict=True):
            assert near(mine, theirs)


def test_the_exchange_runs_on_after_the_step() -> None:
    """Rank 0 ends its backward pass and its step before rank 1 has begun its own."""
    rank_0_has_stepped = threading.Event()

    def rank_main(comm):
        model = mlp()
        optimizer = make(comm, model)
        if comm.rank == 1:
            assert rank_0_has_stepped.wait(timeout=limit(10)), "step() of rank 0 waits for rank 1"
        train(model, optimizer, comm.rank, [0])
        rank_0_has_stepped.set()
        train(model, optimizer, comm.rank, [1, 2])
        optimizer.flush()
        return values(model)

    assert equal(*run_ranks(rank_main, 2))


@pytest.mark.parametrize("zero_fill", [True, False])
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("codec", [None, "float16"])
def test_continuing_from_a_saved_state_is_bit_identical(
    world_size: int, codec: str | None, zero_fill: bool
) -> None:
    options = {"codec": codec, "zero_fill": zero_fill, "weight": "samples"}

    def build():
        return nn.ModuleDict({"used": mlp(), "unused": mlp(4)})

    def go(model, optimizer, rank, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(model["used"], batch(rank, step, 2 + (rank + step) % 3)).backward()
            optimizer.step()

    def rank_main(comm):
        model = build()
        optimizer = make(comm, model, **options)
        model["used"].register_forward_pre_hook(
            lambda _, args: optimizer.set_weight(len(args[0])),
        )
        go(model, optimizer, comm.rank, range(3))
        written = io.BytesIO()
        if comm.rank == 0:  # as a snapshot does: not on the others
            torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, written)
        held = optimizer.state_dict()["torchmn"]
        assert held["schedule"] == "double_buffering"
        pending = held["pending"]
        assert (pending["unused.0.weight"] is None) is (not zero_fill and world_size > 0)
        saved = comm.bcast(
            torch.frombuffer(bytearray(written.getvalue() or b"x"), dtype=torch.uint8)
        )
        go(model, optimizer, comm.rank, range(3, 6))
        optimizer.flush()

        again = build()
        resumed = make(comm, again, **options)
        again["used"].register_forward_pre_hook(
            lambda _, args: resumed.set_weight(len(args[0])),
        )
        go(again, resumed, comm.rank, range(7, 8))  # leaves something pending, which is dropped
        state = torch.load(io.BytesIO(saved.numpy().tobytes()), weights_only=True)
        again.load_state_dict(state["m"])
        resumed.load_state_dict(state["o"])
        go(again, resumed, comm.rank, range(3, 6))
        resumed.flush()
        assert equal(values(again), values(model))
        return values(model)

    results = run_ranks(rank_main, world_size)
    for result in results:
        assert equal(result, results[0])


def test_a_pending_gradient_is_not_lost_to_another_schedule() -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = make(comm, model)
        train(model, optimizer, comm.rank, range(2))
        late = optimizer.state_dict()
        plain = create_multi_node_optimizer(adam(model), comm, model)
        with pytest.raises(UsageError, match=r"'double_buffering'.*'every_step' would lose.*flush"):
            plain.load_state_dict(late)
        optimizer.flush()
        plain.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(plain.state_dict())
        wrong = {**late, "torchmn": {**late["torchmn"], "pending": {"x": torch.ones(1)}}}
        with pytest.raises(UsageError, match=r"of other parameters; they differ in \['0.bias'"):
            optimizer.load_state_dict(wrong)

    run_ranks(rank_main, 2)


def test_two_backward_passes_are_refused_outside_no_sync() -> None:
    def rank_main(comm):
        model = mlp()
        make(comm, model)
        loss_of(model, batch(comm.rank, 0)).backward()
        with pytest.raises(UnsupportedError, match=r"Two backward passes.*no_sync\(\)"):
            loss_of(model, batch(comm.rank, 1)).backward()

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("world_size", WORLDS)
def test_accumulation_with_no_sync(world_size: int, set_to_none: bool) -> None:
    def rank_main(comm):
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), 0.0)
        optimizer = create_multi_node_optimizer(inner, comm, model, double_buffering=True)
        seen = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            with optimizer.no_sync():
                loss_of(model, batch(comm.rank, 2 * step)).backward()
            loss_of(model, batch(comm.rank, 2 * step + 1)).backward()
            seen.append(grads(model))
            optimizer.step()
        optimizer.flush()
        return [*seen[1:], grads(model)]

    model = mlp()
    for seen in run_ranks(rank_main, world_size):
        for step, means in enumerate(seen):
            parts = [
                local_grads(model, batch(rank, 2 * step + i))
                for rank in range(world_size)
                for i in (0, 1)
            ]
            expected = [sum(column) / world_size for column in zip(*parts, strict=True)]
            assert near(means, expected)


def test_flush_between_backward_and_step_applies_both() -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = make(comm, model)
        train(model, optimizer, comm.rank, [0])
        loss_of(model, batch(comm.rank, 1)).backward()
        optimizer.flush()
        twin = mlp()
        other = make(comm, twin)
        train(twin, other, comm.rank, [0, 1])
        other.flush()
        assert equal(values(model), values(twin))

    run_ranks(rank_main, 2)


def test_continues_after_flush() -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = make(comm, model)
        num_steps = []
        optimizer.register_step_post_hook(lambda *_: num_steps.append(1))
        for start in (0, 3):
            train(model, optimizer, comm.rank, range(start, start + 3))
            optimizer.flush()
        assert len(num_steps) == 6
        assert "pending" not in optimizer.state_dict()["torchmn"]
        return values(model)

    assert equal(*run_ranks(rank_main, 2))


def test_a_frozen_parameter_is_not_moved_by_a_late_gradient() -> None:
    def rank_main(comm):
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

    assert equal(*run_ranks(rank_main, 2))


def test_the_first_backward_pass_leaves_no_gradients_sparse_ones_neither() -> None:
    def rank_main(comm):
        model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1))
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = create_multi_node_optimizer(inner, comm, model, schedule="double_buffering")
        model(torch.tensor([comm.rank])).sum().backward()
        assert [parameter.grad for parameter in model.parameters()] == [None] * 3
        optimizer.close()

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_is_converted_while_a_mean_is_late(world_size: int, as_view: bool) -> None:
    def rank_main(comm):
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
        for parameter, mean in zip(reference.double().parameters(), late, strict=True):
            parameter.grad = mean.double()
        sgd.step()
        assert near(values(model), values(reference), 1e-6)

    run_ranks(rank_main, world_size)


def test_lbfgs_is_refused() -> None:
    def rank_main(comm):
        model = mlp()
        lbfgs = torch.optim.LBFGS(model.parameters())
        with pytest.raises(UnsupportedError, match="does not support LBFGS"):
            create_multi_node_optimizer(lbfgs, comm, model, double_buffering=True)

    run_ranks(rank_main, 2)
