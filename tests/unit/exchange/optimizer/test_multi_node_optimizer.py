"""The wrapper is an optimizer as torch's own: schedulers, states, hooks, scalers work on it."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.unit.models import batch, equal, grads, local_grads, loss_of, mlp, near, values
from torchmn import create_multi_node_optimizer
from torchmn.errors import CommunicationError, RankMismatchError, UnsupportedError, UsageError
from torchmn.testing import run_ranks

WORLDS = [1, 2, 3, 4]
SCHEDULES = ["every_step", "double_buffering"]


def momentum(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-3)


def train(model, optimizer, rank, steps, after_step=None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        if after_step is not None:
            after_step(step)


def test_shares_groups_state_and_defaults_with_the_inner_one() -> None:
    def rank_main(comm):
        model = mlp()
        inner = momentum(model)
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
        text = repr(optimizer)
        assert "every_step" in text
        assert f"rank {comm.rank} of 2" in text
        assert "SGD" in text

    run_ranks(rank_main, 2)


MAKERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 1 / (e + 1)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MAKERS)
def test_learning_rate_schedulers_work_without_warnings(name: str, schedule: str) -> None:
    def rates(optimizer, model, rank) -> list[float]:
        scheduler = MAKERS[name](optimizer)
        seen = []

        def after_step(step: int) -> None:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            seen.append(optimizer.param_groups[0]["lr"])

        train(model, optimizer, rank, range(6), after_step)
        return seen

    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(momentum(model), comm, model, schedule=schedule)
        return rates(optimizer, model, comm.rank), values(model)

    reference = mlp()
    expected = rates(momentum(reference), reference, 0)
    assert len(set(expected)) > 1
    (first, model_0), (second, model_1) = run_ranks(rank_main, 2)
    assert first == second == expected
    assert equal(model_0, model_1)


def test_states_travel_between_plain_and_multi_node() -> None:
    plain_model = mlp()
    plain = momentum(plain_model)
    train(plain_model, plain, 0, range(3))

    def rank_main(comm):
        model = mlp()
        model.load_state_dict(plain_model.state_dict())
        optimizer = create_multi_node_optimizer(momentum(model), comm, model)
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        momenta = [s["momentum_buffer"] for s in optimizer.state.values()]
        assert equal(momenta, [s["momentum_buffer"] for s in plain.state.values()])
        train(model, optimizer, comm.rank, range(3, 5))
        written = io.BytesIO()
        torch.save(optimizer.state_dict(), written)
        return values(model), written.getvalue()

    (model_0, written), (model_1, _) = run_ranks(rank_main, 2)
    assert equal(model_0, model_1)
    again_model = mlp()
    again = momentum(again_model, lr=9.0)
    again.load_state_dict(torch.load(io.BytesIO(written), weights_only=True))
    assert again.param_groups[0]["lr"] == 0.1
    assert len(again.state) == 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_copies_and_pickles_are_refused(world_size: int) -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(momentum(model), comm, model)
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match=r"cannot be copied.*state_dict\(\)"):
                duplicate(optimizer)
        assert copy.deepcopy(optimizer.inner).param_groups[0]["lr"] == 0.1

    run_ranks(rank_main, world_size)


def test_step_hooks_see_means() -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(momentum(model), comm, model)
        seen: list[object] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(grads(model)))
        handle = optimizer.register_step_post_hook(lambda *_: seen.append(values(model)))
        train(model, optimizer, comm.rank, [0])
        handle.remove()
        train(model, optimizer, comm.rank, [1])
        assert len(seen) == 3
        return seen

    a, b = run_ranks(rank_main, 2)
    for mine, theirs in zip(a, b, strict=True):
        assert equal(mine, theirs)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool, schedule: str) -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(momentum(model), comm, model, schedule=schedule)
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            if set_to_none:
                assert grads(model) == [None] * 4
            else:
                assert all(g is None or not g.any() for g in grads(model))
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
        optimizer.flush()
        return values(model)

    results = run_ranks(rank_main, 3)
    for result in results[1:]:
        assert equal(result, results[0])
    reference = mlp()
    inner = momentum(reference)
    history = []
    for step in range(4):
        local = [local_grads(reference, batch(r, step)) for r in range(3)]
        history.append([sum(parts) / 3 for parts in zip(*local, strict=True)])
        late = schedule == "double_buffering"
        if not late or step > 0:
            apply(inner, reference, history[step - late])
    if late:
        apply(inner, reference, history[3])
    assert near(results[0], values(reference))


def apply(inner, model, means) -> None:
    for parameter, mean in zip(model.parameters(), means, strict=True):
        parameter.grad = mean
    inner.step()


@pytest.mark.parametrize("world_size", WORLDS)
def test_gradients_are_means_when_backward_returns(world_size: int) -> None:
    def rank_main(comm):
        model = mlp(comm.rank)
        optimizer = create_multi_node_optimizer(momentum(model), comm, model)
        expected = [local_grads(model, batch(r, 0)) for r in range(comm.size)]
        loss_of(model, batch(comm.rank, 0)).backward()
        means = [sum(parts) / comm.size for parts in zip(*expected, strict=True)]
        assert near(grads(model), means)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        clipped = grads(model)
        assert torch.linalg.vector_norm(torch.cat([g.flatten() for g in clipped])) < 0.0101
        assert torch.equal(optimizer.clip_grad_norm_(1e9), torch.nn.utils.get_total_norm(clipped))
        optimizer.step()
        return norm, clipped, values(model)

    results = run_ranks(rank_main, world_size, name="hierarchical")
    for norm, clipped, after in results:
        assert norm > 0.01
        assert torch.equal(norm, results[0][0])
        assert equal(clipped, results[0][1])
        assert equal(after, results[0][2])


@pytest.mark.parametrize("codec", [None, "float16"])
def test_grad_scaler_skips_on_all_ranks_when_one_overflows(codec: str | None) -> None:
    def rank_main(comm):
        model = mlp(dtype=torch.float32)
        optimizer = create_multi_node_optimizer(momentum(model), comm, model, codec=codec)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        scales = []
        for step in range(5):
            before = values(model)
            optimizer.zero_grad()
            x = batch(comm.rank, step, dtype=torch.float32)
            if step == 1 and comm.rank == 1:
                x = x * float("inf")
            scaler.scale(loss_of(model, x)).backward()
            if step == 3:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            assert equal(before, values(model)) is (step == 1)
            scales.append(scaler.get_scale())
        return scales, values(model)

    results = run_ranks(rank_main, 3)
    assert results[0][0] == [1024.0, 512.0, 512.0, 512.0, 1024.0]
    for scales, after in results:
        assert scales == results[0][0]
        assert equal(after, results[0][1])
        assert all(v.isfinite().all() for v in after)


def test_grad_scaler_gives_the_steps_of_one_process() -> None:
    reference = mlp(dtype=torch.float32)
    inner = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(3):
        inner.zero_grad()
        for rank in range(2):
            (loss_of(reference, batch(rank, step, dtype=torch.float32)) / 2).backward()
        inner.step()

    def rank_main(comm):
        model = mlp(dtype=torch.float32)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = create_multi_node_optimizer(inner, comm, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch(comm.rank, step, dtype=torch.float32))).backward()
            scaler.step(optimizer)
            scaler.update()
        return values(model)

    for result in run_ranks(rank_main, 2):
        assert near(result, values(reference), 1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_grad_scaler_is_refused_where_gradients_are_late(world_size: int) -> None:
    def rank_main(comm):
        model = mlp(dtype=torch.float32)
        optimizer = create_multi_node_optimizer(momentum(model), comm, model, double_buffering=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, batch(0, 0, dtype=torch.float32))).backward()
        with pytest.raises(UnsupportedError, match=r"GradScaler and double_buffering.*bfloat16"):
            scaler.step(optimizer)
        off = torch.amp.GradScaler("cpu", enabled=False)
        off.step(optimizer)  # switched off it only steps

    run_ranks(rank_main, world_size)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_group_added_later_is_broadcast_and_exchanged(schedule: str) -> None:
    def rank_main(comm):
        model = nn.Sequential(mlp(), mlp())[:1]
        optimizer = create_multi_node_optimizer(momentum(model), comm, model, schedule=schedule)
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

    results = run_ranks(rank_main, 3, name="hierarchical")
    for result in results[1:]:
        assert equal(result, results[0])


def test_a_group_that_is_not_in_the_model_is_refused_and_not_added() -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(momentum(model), comm, model)
        with pytest.raises(UsageError, match=r"group 1, shape \[2\], is not in the model"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert len(optimizer.param_groups) == 1
        train(model, optimizer, comm.rank, range(2))

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_closures_decide_identically_on_all_ranks(world_size: int, line_search: str | None) -> None:
    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn=line_search)

    def run(model, optimizer, xs) -> list[float]:
        losses = []
        for _ in range(3):

            def closure():
                optimizer.zero_grad()
                loss = sum(loss_of(model, x) for x in xs) / len(xs)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses

    reference = mlp()
    expected = run(reference, lbfgs(reference), [batch(r, 0) for r in range(world_size)])

    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(lbfgs(model), comm, model)
        return run(model, optimizer, [batch(comm.rank, 0)]), values(model)

    results = run_ranks(rank_main, world_size)
    for losses, after in results:
        assert losses == results[0][0]
        assert equal(after, results[0][1])
    assert results[0][0] == pytest.approx(expected, abs=1e-9)
    assert near(results[0][1], values(reference), 1e-8)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_closure_without_backward_on_one_rank(schedule: str) -> None:
    """A rank whose batch is empty participates with zeros, in the same order as the others."""

    def rank_main(comm):
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule)

        def closure() -> float:
            optimizer.zero_grad()
            if comm.rank == 1:
                return 0.0
            loss = loss_of(model, batch(0, 0))
            loss.backward()
            return float(loss.detach())

        loss = optimizer.step(closure)
        optimizer.flush()
        return loss, values(model)

    reference = mlp()
    expected = local_grads(reference, batch(0, 0))
    (loss_0, model_0), (loss_1, model_1) = run_ranks(rank_main, 2, timeout_s=5)
    assert loss_0 == loss_1 == pytest.approx(float(loss_of(reference, batch(0, 0)).detach()) / 2)
    assert equal(model_0, model_1)
    after = [v - 0.1 * g / 2 for v, g in zip(values(reference), expected, strict=True)]
    assert near(model_0, after)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_step_on_a_rank_without_backward_counts_as_zeros(schedule: str) -> None:
    def rank_main(comm):
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule)
        if comm.rank != 1:
            loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        optimizer.flush()
        return values(model)

    results = run_ranks(rank_main, 3, timeout_s=5)
    reference = mlp()
    parts = [local_grads(reference, batch(rank, 0)) for rank in (0, 2)]
    means = [(a + b) / 3 for a, b in zip(*parts, strict=True)]
    after = [v - 0.1 * g for v, g in zip(values(reference), means, strict=True)]
    for result in results:
        assert equal(result, results[0])
    assert near(results[0], after)


@pytest.mark.parametrize("name", ["flat", "hierarchical"])
@pytest.mark.parametrize("schedule", ["every_step", "double_buffering"])
@pytest.mark.parametrize("codec", [None, "1bit"])
def test_a_backward_that_raises_on_all_ranks_may_be_repeated(name: str, schedule, codec) -> None:
    def rank_main(comm, *, raises):
        comm.bucket_bytes = 1
        model = mlp()
        optimizer = create_multi_node_optimizer(
            momentum(model), comm, model, schedule=schedule, codec=codec
        )
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


def test_a_backward_that_raises_and_is_repeated_on_one_rank_alone_is_named_on_the_other() -> None:
    def rank_main(comm):
        comm.bucket_bytes = 1
        model = mlp()
        optimizer = create_multi_node_optimizer(momentum(model), comm, model)
        if comm.rank == 1:
            with pytest.raises(ValueError, match="broken layer"):
                loss_of(nn.Sequential(Raises(), *model), batch(comm.rank, 0)).backward()
        else:
            with pytest.raises(
                RankMismatchError, match=r"rank 1 raised an exception in its backward"
            ):
                loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, 0)).backward()
        locals_ = [local_grads(model, batch(rank, 0)) for rank in range(comm.size)]
        assert near(grads(model), [(a + b) / 2 for a, b in zip(*locals_, strict=True)])

    run_ranks(rank_main, 2)


def test_a_backward_that_raises_on_one_rank_ends_the_others_in_time() -> None:
    def rank_main(comm):
        comm.bucket_bytes = 1
        model = mlp()
        optimizer = create_multi_node_optimizer(momentum(model), comm, model)
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


def test_use_after_finalize_is_an_error_with_the_cure() -> None:
    def rank_main(comm):
        model = mlp()
        create_multi_node_optimizer(momentum(model), comm, model)
        comm.finalize()
        with pytest.raises(CommunicationError, match="was finalized. Create a new one"):
            loss_of(model, batch(comm.rank, 0)).backward()

    run_ranks(rank_main, 2)


def test_close_lets_go_of_the_model() -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(momentum(model), comm, model, weight="samples")
        train(model, optimizer, comm.rank, range(2))
        optimizer.close()
        expected = local_grads(model, batch(comm.rank, 2))
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, 2)).backward()
        assert equal(grads(model), expected)  # of this rank alone
        again = create_multi_node_optimizer(momentum(model), comm, model)
        train(model, again, comm.rank, range(3))
        assert again.reducer.step == 3
        return values(model)

    results = run_ranks(rank_main, 2)
    assert equal(*results)


def test_a_forgotten_optimizer_of_the_inner_class_still_answers() -> None:
    """What only the inner optimizer has is found through ours."""

    def rank_main(comm):
        model = mlp()
        inner = momentum(model)
        inner.note = "mine"
        optimizer = create_multi_node_optimizer(inner, comm, model)
        assert optimizer.note == "mine"
        with pytest.raises(AttributeError):
            _ = optimizer.nothing_of_the_kind

    run_ranks(rank_main, 1)


def test_nothing_warns_in_a_plain_loop() -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(momentum(model), comm, model)
        for step in range(3):
            model.zero_grad()  # not through the optimizer, as some write
            loss_of(model, batch(comm.rank, step)).backward()
            if step != 1:  # a step that is left out, as GradScaler does
                optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(rank_main, 2)
