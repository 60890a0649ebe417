"""Every step in float32 first; then another schedule."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.ranks import on_ranks
from tests.unit.exchange.schedules.local_updates.runs import adam, momentum, set_values, wrap
from tests.unit.models import (
    batch,
    closure_of,
    equal,
    local_grads,
    mlp,
    near,
    set_grads,
    train,
    values,
)
from torchmn import create_multi_node_optimizer, scatter_loader
from torchmn.errors import UnsupportedError, UsageError
from torchmn.exchange.replicas import different_tensors
from torchmn.exchange.schedules import DiLoCo, DoubleBuffering, EveryStep, PeriodicAverage, Warmup
from torchmn.testing import run_ranks


def num_encoded(comm) -> int:
    return sum(entry.name == "scatter_float16" for entry in comm.flight_recorder.entries())


def mean_of(columns):
    return [sum(column) / len(column) for column in zip(*columns, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_step_then_blocks_against_a_simulation(size: int) -> None:
    """Batches of 4: two steps of every step; then blocks of three."""

    def rank_main(comm):
        schedule = Warmup(8 * size, PeriodicAverage(12 * size))
        model, optimizer = wrap(comm, schedule, momentum)
        seen = []
        for step in range(8):
            train(model, optimizer, comm.rank, [step])
            seen.append(values(model))
        return seen, schedule.num_samples

    models = [mlp() for _ in range(size)]
    inners = [momentum(model) for model in models]
    history = []
    for step in range(8):
        gradients = [local_grads(m, batch(rank, step)) for rank, m in enumerate(models)]
        if step < 2:
            gradients = [mean_of(gradients)] * size
        for model, inner, own in zip(models, inners, gradients, strict=True):
            set_grads(model, own)
            inner.step()
        if step in (4, 7):
            mean = mean_of([values(model) for model in models])
            for model in models:
                set_values(model, mean)
        history.append([values(model) for model in models])
    for rank, (seen, num_samples) in enumerate(run_ranks(rank_main, size)):
        assert num_samples == 32 * size
        for step, mine in enumerate(seen):
            assert near(mine, history[step][rank]), step


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [(EveryStep, [0, 0, 1, 2]), (lambda: PeriodicAverage(16), [0, 0, 0, 1])],
    ids=["every_step", "periodic_average"],
)
@on_ranks(2)
def test_the_codec_is_used_after_the_warm_up(comm, schedule, expected: list[int]) -> None:
    model, optimizer = wrap(comm, Warmup(16, schedule()), codec="float16")
    counts = []
    for step in range(4):
        train(model, optimizer, comm.rank, [step])
        counts.append(num_encoded(comm))
    assert counts == expected


@on_ranks(2)
def test_no_warm_up(comm) -> None:
    model, optimizer = wrap(comm, Warmup(0, PeriodicAverage(16)))
    plain, each = wrap(comm, PeriodicAverage(16))
    for step in range(3):
        train(model, optimizer, comm.rank, [step])
        train(plain, each, comm.rank, [step])
        assert equal(values(model), values(plain))


@pytest.mark.parametrize("saved_after", [1, 4])
@pytest.mark.parametrize("loaded_after", [0, 2, 5])
@on_ranks(2)
def test_a_state_is_loaded_during_the_warm_up_and_after_it(
    comm, saved_after: int, loaded_after: int
) -> None:
    def start():
        return wrap(comm, Warmup(16, DiLoCo(16, overlap_steps=1)), adam, codec="float16")

    model, optimizer = start()
    train(model, optimizer, comm.rank, range(saved_after))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, resumed = start()
    for step in range(loaded_after):
        train(again, resumed, comm.rank, [50 + step])
    again.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    for step in range(saved_after, saved_after + 5):
        train(model, optimizer, comm.rank, [step])
        train(again, resumed, comm.rank, [step])
        assert equal(values(model), values(again)), step


@on_ranks(1)
def test_states_from_before_and_after_the_end_are_not_combined(comm) -> None:
    model, optimizer = wrap(comm, Warmup(8, PeriodicAverage(16)))
    early = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, comm.rank, range(2))
    late = optimizer.state_dict()
    with pytest.raises(UsageError, match=r"on some of the old ranks \(\[False, True\]\)"):
        optimizer.reshard_state_dict([early, late], comm)


@on_ranks(2)
def test_a_closure(comm) -> None:
    model = mlp()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    schedule = Warmup(20, PeriodicAverage(16))
    optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule)
    for step in range(5):
        optimizer.step(closure_of(model, optimizer, batch(comm.rank, step)))
    assert schedule.is_over
    optimizer.flush()
    assert different_tensors(comm, [model]) == []


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf")])
def test_values_that_make_no_sense(after: float) -> None:
    with pytest.raises(UsageError, match="must be a number that is 0 or more"):
        Warmup(after, EveryStep())


def test_schedules_that_cannot_follow() -> None:
    with pytest.raises(UnsupportedError, match="DoubleBuffering cannot follow a warm-up"):
        Warmup(8, DoubleBuffering())  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_batches_weigh_by_their_samples(size: int) -> None:
    """Batches of 5 over two ranks, as with `EveryStep` alone."""

    def rank_main(comm, schedule):
        model = mlp()
        optimizer = create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), comm, model, schedule=schedule()
        )
        data = torch.utils.data.TensorDataset(batch(0, 0, 15))
        for (x,) in scatter_loader(torch.utils.data.DataLoader(data, batch_size=5), comm):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return values(model)

    def warmup():
        return Warmup(10**6, PeriodicAverage(64))

    for found, expected in zip(
        run_ranks(lambda comm: rank_main(comm, warmup), size),
        run_ranks(lambda comm: rank_main(comm, EveryStep), size),
        strict=True,
    ):
        assert equal(found, expected)


@on_ranks(2)
def test_sums_are_refused_where_ranks_have_own_steps_later(comm) -> None:
    model = mlp()
    schedule = Warmup(1000, PeriodicAverage(64))
    with pytest.raises(UnsupportedError, match="reduction='sum'"):
        create_multi_node_optimizer(
            momentum(model), comm, model, schedule=schedule, reduction="sum"
        )


@pytest.mark.parametrize("has_closure", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [EveryStep, lambda: Warmup(10**6, EveryStep()), lambda: PeriodicAverage(64)],
    ids=["every_step", "warmup", "periodic_average"],
)
@on_ranks(1, 2)
def test_missing_gradients_are_filled_with_zeros(comm, schedule, has_closure: bool) -> None:
    """Weight decay then moves a parameter that no loss depends on: 1 * 0.9 * 0.9."""
    model = mlp()
    model.unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    inner = torch.optim.SGD(model.parameters(), 0.1, weight_decay=1.0)
    optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule(), zero_fill=True)

    closure = closure_of(model, optimizer, batch(comm.rank, 0, 4))
    for _ in range(2):
        if has_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert torch.allclose(model.unused, torch.full((2,), 0.81, dtype=torch.float64))
