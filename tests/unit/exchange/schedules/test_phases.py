"""One schedule after another."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.unit.exchange.schedules.local_updates.runs import adam, momentum, set_values, train, wrap
from tests.unit.models import batch, closure_of, equal, local_grads, loss_of, mlp, near, values
from torchmn import create_multi_node_optimizer, scatter_loader
from torchmn.errors import RankMismatchError, UnsupportedError, UsageError
from torchmn.exchange.replicas import different_tensors
from torchmn.exchange.schedules import (
    DiLoCo,
    DoubleBuffering,
    EveryStep,
    PeriodicAverage,
    Phases,
    Warmup,
)
from torchmn.testing import run_ranks


def num_encoded(comm) -> int:
    return sum(entry.name == "scatter_float16" for entry in comm.flight_recorder.entries())


def mean_of(columns):
    return [sum(column) / len(column) for column in zip(*columns, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_step_then_blocks_then_every_step_against_a_simulation(size: int) -> None:
    """Batches of 4: two steps; blocks of three, until 9 steps or more; every step again."""

    def rank_main(comm):
        phases = {
            0: EveryStep(),
            8 * size: PeriodicAverage(12 * size),
            28 * size: EveryStep(),  # in the middle of the second block
        }
        model, optimizer = wrap(comm, Phases(phases), momentum)
        seen = []
        for step in range(12):
            train(model, optimizer, comm.rank, step)
            seen.append(values(model))
        return seen, optimizer.schedule.began_at

    models = [mlp() for _ in range(size)]
    inners = [momentum(model) for model in models]
    history = []
    for step in range(12):
        gradients = [local_grads(m, batch(rank, step)) for rank, m in enumerate(models)]
        if not 2 <= step < 8:
            gradients = [mean_of(gradients)] * size
        for model, inner, own in zip(models, inners, gradients, strict=True):
            for parameter, gradient in zip(model.parameters(), own, strict=True):
                parameter.grad = gradient.clone()
            inner.step()
        if step in (4, 7):
            mean = mean_of([values(model) for model in models])
            for model in models:
                set_values(model, mean)
        if step == 7:  # the optimizers' states become their mean
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                states = [
                    inner.state[p]["momentum_buffer"]
                    for inner, p in zip(inners, parameters, strict=True)
                ]
                mean_state = sum(states) / size
                for state in states:
                    state.copy_(mean_state)
        history.append([values(model) for model in models])
    for rank, (seen, began_at) in enumerate(run_ranks(rank_main, size)):
        assert began_at == [0, 8 * size, 32 * size]
        for step, mine in enumerate(seen):
            assert near(mine, history[step][rank]), step


def test_each_phase_has_the_codec_but_exact_ones() -> None:
    def rank_main(comm):
        schedule = Phases(
            {0: EveryStep(exact=True), 16: PeriodicAverage(16), 32: EveryStep(), 40: DiLoCo(16)}
        )
        model, optimizer = wrap(comm, schedule, codec="float16")
        counts = []
        for step in range(7):
            train(model, optimizer, comm.rank, step)
            counts.append(num_encoded(comm))
        return counts

    # Two exact steps; two steps by blocks, and the flush that ends them; one step; two by blocks.
    for counts in run_ranks(rank_main, 2):
        assert counts == [0, 0, 0, 2, 3, 3, 4]


def test_rates_that_differ_are_refused_where_ranks_take_the_same_steps() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, Phases({0: PeriodicAverage(16), 16: EveryStep()}))
        optimizer.param_groups[0]["lr"] = 0.1 + comm.rank
        train(model, optimizer, comm.rank, 0)
        with pytest.raises(RankMismatchError, match=r"learning rates differ: \{0: \[0.1\], 1: \[1"):
            train(model, optimizer, comm.rank, 1)

    run_ranks(rank_main, 2)


def test_a_phase_that_no_exchange_falls_into_is_left_out() -> None:
    def rank_main(comm):
        schedule = Phases({0: EveryStep(), 9: PeriodicAverage(16), 10: EveryStep()})
        model, optimizer = wrap(comm, schedule)
        plain, each = wrap(comm, "every_step")
        for step in range(4):
            train(model, optimizer, comm.rank, step)
            train(plain, each, comm.rank, step)
        assert equal(values(model), values(plain))
        assert schedule.num_samples == 32

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("saved_after", [1, 4, 7])
@pytest.mark.parametrize("loaded_after", [0, 2, 5, 8])
def test_a_state_is_loaded_in_any_phase(saved_after: int, loaded_after: int) -> None:
    def rank_main(comm):
        def start():
            phases = {0: EveryStep(exact=True), 16: DiLoCo(16, overlap_steps=1), 48: EveryStep()}
            return wrap(comm, Phases(phases), adam, codec="float16")

        model, optimizer = start()
        for step in range(saved_after):
            train(model, optimizer, comm.rank, step)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        again, resumed = start()
        for step in range(loaded_after):
            train(again, resumed, comm.rank, 50 + step)
        again.load_state_dict(state[0])
        resumed.load_state_dict(state[1])
        for step in range(saved_after, saved_after + 5):
            train(model, optimizer, comm.rank, step)
            train(again, resumed, comm.rank, step)
            assert equal(values(model), values(again)), step

    run_ranks(rank_main, 2)


def test_states_of_other_phases_are_refused() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, Phases({0: EveryStep(), 8: PeriodicAverage(16)}))
        early = copy.deepcopy(optimizer.state_dict())
        for step in range(2):
            train(model, optimizer, comm.rank, step)
        late = optimizer.state_dict()
        with pytest.raises(UsageError, match=r"saved in different phases \(\[1, 2\]\)"):
            optimizer.reshard_state_dict([early, late], comm)
        _, other = wrap(comm, Phases({0: EveryStep()}))
        late["torchmn"]["schedule"] = "every_step"
        with pytest.raises(UsageError, match="saved in phase 2, and there are 1"):
            other.load_state_dict(late)

    run_ranks(rank_main, 1)


def test_a_closure_in_every_phase() -> None:
    def rank_main(comm):
        model = mlp()
        inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        schedule = Phases({0: EveryStep(), 20: PeriodicAverage(16), 60: EveryStep()})
        optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule)
        for step in range(8):
            optimizer.step(closure_of(model, optimizer, batch(comm.rank, step)))
        assert schedule.current is schedule.schedules[-1]
        assert different_tensors(comm, [model]) == []

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    ("phases", "error", "message"),
    [
        ({}, UsageError, r"begin at \[\] samples"),
        ({8: EveryStep()}, UsageError, "the first one 0"),
        ({0: EveryStep(), -1: EveryStep()}, UsageError, "0 or more"),
        ({0: EveryStep(), float("inf"): EveryStep()}, UsageError, "0 or more"),
        ({0: EveryStep(), 8: DoubleBuffering()}, UnsupportedError, "DoubleBuffering cannot be"),
        (dict.fromkeys((0, 8), EveryStep()), UsageError, "Make one for each phase"),
    ],
)
def test_what_makes_no_sense(phases: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Phases(phases)


@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_batches_weigh_by_their_samples_in_a_phase_of_every_step(size: int) -> None:
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

    def phases():
        return Phases({0: EveryStep(), 10**6: PeriodicAverage(64)})

    for found, expected in zip(
        run_ranks(lambda comm: rank_main(comm, phases), size),
        run_ranks(lambda comm: rank_main(comm, EveryStep), size),
        strict=True,
    ):
        assert equal(found, expected)


def test_sums_are_refused_where_a_phase_has_own_steps() -> None:
    def rank_main(comm):
        model = mlp()
        schedule = Phases({0: PeriodicAverage(64), 1000: EveryStep()})
        with pytest.raises(UnsupportedError, match="reduction='sum'"):
            create_multi_node_optimizer(
                momentum(model), comm, model, schedule=schedule, reduction="sum"
            )

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("has_closure", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [EveryStep, lambda: Phases({0: EveryStep()}), lambda: PeriodicAverage(64)],
    ids=["every_step", "phases", "periodic_average"],
)
def test_missing_gradients_are_filled_with_zeros(schedule, has_closure: bool, size: int) -> None:
    """Weight decay then moves a parameter that no loss depends on: 1 * 0.9 * 0.9."""

    def rank_main(comm):
        model = mlp()
        model.unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        inner = torch.optim.SGD(model.parameters(), 0.1, weight_decay=1.0)
        optimizer = create_multi_node_optimizer(
            inner, comm, model, schedule=schedule(), zero_fill=True
        )

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch(comm.rank, 0, 4))
            loss.backward()
            return loss

        for _ in range(2):
            if has_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return model.unused.detach()

    for found in run_ranks(rank_main, size):
        assert torch.allclose(found, torch.full((2,), 0.81, dtype=torch.float64))


# ---- warm-up: the codec comes in at one step on all ranks ----


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf")])
def test_values_that_make_no_sense(after: float) -> None:
    with pytest.raises(UsageError, match="must be a number that is 0 or more"):
        Warmup(after, EveryStep())
