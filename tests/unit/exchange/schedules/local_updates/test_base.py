"""All local-update schedules: ends of blocks, weights, overlap, fragments, state, uneven loops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.limits import limit
from tests.ranks import on_ranks
from tests.unit.exchange.schedules.local_updates.runs import adam, momentum, set_values, sgd, wrap
from tests.unit.models import (
    OfObject,
    batch,
    equal,
    local_grads,
    loss_of,
    mean_grads,
    mlp,
    near,
    set_grads,
    train,
    values,
)
from torchmn import create_multi_node_optimizer, scatter_loader
from torchmn.cluster import Topology
from torchmn.errors import NonFiniteGradientError, ResultWarning, UnsupportedError, UsageError
from torchmn.exchange.replicas import different_tensors
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, PeriodicAverage, Warmup
from torchmn.testing import run_ranks

SCHEDULES = [PeriodicAverage, BlockMomentum, DiLoCo]


# ---- when a block ends, and the means ----


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 5), (3, 7), (2, 47)])
def test_uneven_parts_of_a_loader_end_blocks_in_the_same_step(
    schedule: type, world_size: int, batch_size: int
) -> None:
    """So that a script may call other collectives in each step, as to save a checkpoint."""

    def rank_main(comm):
        model, optimizer = wrap(comm, schedule(16))
        rows = DataLoader(TensorDataset(batch(0, 0, 48)), batch_size=batch_size)
        for (own,) in scatter_loader(rows, comm):
            optimizer.zero_grad()
            loss_of(model, own).backward()
            optimizer.step()
            comm.barrier()
        optimizer.flush()
        return optimizer.schedule.num_samples, values(model)

    results = run_ranks(rank_main, world_size)
    assert all(num == 48 and equal(held, results[0][1]) for num, held in results)


def test_a_codec_is_used_between_nodes_only() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, Warmup(16, PeriodicAverage(16)), codec="float16")
        train(model, optimizer, comm.rank, range(4))
        assert different_tensors(comm, [model]) == []
        names = [entry.name for entry in comm.flight_recorder.entries()]
        return names.count("scatter_float16")

    counts = run_ranks(rank_main, 4, name="hierarchical", topology=Topology.blocks([2, 2]))
    assert counts == [3, 0, 3, 0]  # the first step was of the warm-up


@on_ranks(2)
def test_missing_sample_counts_raise_an_error_with_the_cure(comm) -> None:
    model = OfObject()
    optimizer = create_multi_node_optimizer(sgd(model), comm, model, schedule=PeriodicAverage(8))
    model(SimpleNamespace(x=batch(comm.rank, 0))).sum().backward()
    with pytest.raises(UsageError, match=r"counts samples.*set_weight\(number_of_samples\)"):
        optimizer.step()
    optimizer.set_weight(4)
    optimizer.step()
    assert different_tensors(comm, [model]) == []
    assert optimizer.schedule.num_samples == 8


# ---- overlap and fragments ----


@pytest.mark.parametrize("k", [1, 2])
def test_what_was_learned_meanwhile_belongs_to_the_next_block(k: int) -> None:
    """Against a simulation, step by step; blocks of 3 steps."""

    def rank_main(comm):
        model, optimizer = wrap(comm, PeriodicAverage(24, overlap_steps=k))
        seen = []
        for step in range(9):
            train(model, optimizer, comm.rank, [step])
            seen.append(values(model))
        return seen

    models = [mlp(), mlp()]
    anchors = values(models[0])
    pending = None
    results = run_ranks(rank_main, 2)
    for step in range(9):
        for rank, model in enumerate(models):
            parts = local_grads(model, batch(rank, step))
            set_values(model, [p - 0.1 * g for p, g in zip(values(model), parts, strict=True)])
        if pending is not None and step == pending[0]:
            starts = pending[1]
            anchors = [sum(column) / 2 for column in zip(*starts, strict=True)]
            for model, start in zip(models, starts, strict=True):
                kept = zip(anchors, values(model), start, strict=True)
                set_values(model, [a + (w - s) for a, w, s in kept])
            pending = None
        if step % 3 == 2:
            pending = (step + k, [values(model) for model in models])
        for rank, model in enumerate(models):
            assert near(results[rank][step], values(model)), (rank, step)


def test_steps_continue_while_the_exchange_is_pending() -> None:
    """Rank 1 reaches the exchange only after rank 0 has made two more steps."""
    late = threading.Event()

    def rank_main(comm):
        model, optimizer = wrap(comm, PeriodicAverage(8, overlap_steps=3))
        for step in range(7):  # the first exchange also compares where the ranks started
            if comm.rank == 1 and step == 4:
                assert late.wait(limit(10))
            train(model, optimizer, comm.rank, [step], 4 if step == 0 else 1)
        if comm.rank == 0:
            late.set()
        optimizer.flush()
        return values(model)

    assert equal(*run_ranks(rank_main, 2))


@pytest.mark.parametrize("k", [0, 1])
@on_ranks(2)
def test_large_batches_end_several_fragments_in_one_step(comm, k: int) -> None:
    schedule = PeriodicAverage(8 * comm.size, num_fragments=4, overlap_steps=k)
    model, optimizer = wrap(comm, schedule)
    train(model, optimizer, comm.rank, range(5), 5 + 2 * comm.rank)
    optimizer.flush()
    assert different_tensors(comm, [model]) == []


# ---- within the node ----


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("nodes", [[2, 1], [2, 2], [1, 1], [3]], ids=str)
def test_every_step_within_the_node(nodes: list[int], k: int) -> None:
    """Nodes train as one worker with the mean of its ranks' gradients."""
    topology = Topology.blocks(nodes)
    num_ranks = topology.size

    def rank_main(comm):
        schedule = PeriodicAverage(12 * num_ranks, intra_node="every_step", overlap_steps=k)
        model, optimizer = wrap(comm, schedule, momentum)
        history = []
        for step in range(6):
            train(model, optimizer, comm.rank, [step])
            same_node = [
                theirs
                for rank, theirs in enumerate(comm.allgather_obj(values(model)))
                if comm.topology.place(rank).inter_rank == comm.inter_rank
            ]
            assert all(equal(theirs, values(model)) for theirs in same_node)
            history.append(values(model))
        optimizer.flush()
        assert different_tensors(comm, [model]) == []
        optimizer.close()
        return history

    results = run_ranks(rank_main, num_ranks, name="hierarchical", topology=topology)
    if k:
        return
    models = [mlp() for _ in nodes]
    inners = [momentum(model) for model in models]
    for step in range(6):
        for node, (model, inner) in enumerate(zip(models, inners, strict=True)):
            set_grads(model, mean_grads(model, topology.nodes[node], step))
            inner.step()
        if step % 3 == 2:
            mean = [
                sum(n * part for n, part in zip(nodes, column, strict=True)) / num_ranks
                for column in zip(*(values(model) for model in models), strict=True)
            ]
            for model in models:
                set_values(model, mean)
        for node, model in enumerate(models):
            assert near(results[topology.nodes[node][0]][step], values(model)), step


# ---- ranks whose data end at different steps ----


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("lengths", [[1, 5, 3, 3], [4, 4, 0, 0], [0, 0, 0, 6]], ids=str)
def test_uneven_loops_with_every_step_within_the_node(lengths: list[int], k: int) -> None:
    def rank_main(comm):
        schedule = DiLoCo(16, intra_node="every_step", overlap_steps=k, num_fragments=2)
        model, optimizer = wrap(comm, schedule, adam)
        for epoch in range(3):
            with optimizer.join():
                for step in range(lengths[comm.rank]):
                    train(model, optimizer, comm.rank, [10 * epoch + step])
            assert different_tensors(comm, [model]) == []
        assert schedule.num_samples == 3 * 4 * sum(lengths)
        assert list(optimizer.nonfinite) == []
        optimizer.close()

    topology = Topology.blocks([2, 2])
    run_ranks(rank_main, 4, name="hierarchical", topology=topology)


def test_loops_within_the_node_are_weighted_by_samples() -> None:
    """Node 0: rank 0 leaves after 1 of 3 steps, so that the node has 16 samples; node 1 has 12."""

    def rank_main(comm):
        model, optimizer = wrap(comm, PeriodicAverage(1000, intra_node="every_step"))
        with optimizer.join():
            train(model, optimizer, comm.rank, range([1, 3, 3][comm.rank]))
        optimizer.close()
        return values(model)

    models = [mlp(), mlp()]
    for step in range(3):
        here = [0, 1] if step == 0 else [1]
        for model, ranks in zip(models, (here, [2]), strict=True):
            mean = mean_grads(model, ranks, step)
            set_values(model, [p - 0.1 * g for p, g in zip(values(model), mean, strict=True)])
    expected = [
        (16 * a + 12 * b) / 28 for a, b in zip(*(values(model) for model in models), strict=True)
    ]
    for result in run_ranks(rank_main, 3, topology=Topology.blocks([2, 1])):
        assert near(result, expected)


# ---- state ----


@on_ranks(2)
def test_incompatible_states_are_rejected(comm) -> None:
    _, optimizer = wrap(comm, PeriodicAverage(16))
    _, in_parts = wrap(comm, PeriodicAverage(16, num_fragments=2))
    model, _ = wrap(comm, PeriodicAverage(16))
    train(model, create_multi_node_optimizer(sgd(model), comm, model), comm.rank, [0])
    with pytest.raises(UsageError, match="num_fragments=2, and here it is 1"):
        optimizer.load_state_dict(in_parts.state_dict())
    plain = mlp()
    each = create_multi_node_optimizer(sgd(plain), comm, plain)
    with pytest.raises(UsageError, match="saved with schedule 'periodic_average'"):
        each.load_state_dict(optimizer.state_dict())


@on_ranks(2)
def test_a_plain_state_starts_from_scratch(comm) -> None:
    schedule = Warmup(8, BlockMomentum(16))
    model, optimizer = wrap(comm, schedule)
    train(model, optimizer, comm.rank, range(4))
    optimizer.flush()
    optimizer.load_state_dict(sgd(mlp()).state_dict())
    assert (schedule.traits.replica_consistency, schedule.num_samples) == ("per_step", 0)
    assert schedule.schedule.num_samples == 0
    train(model, optimizer, comm.rank, [5])
    assert schedule.num_samples == 8
    assert different_tensors(comm, [model]) == []


@on_ranks(2)
def test_steps_whose_samples_are_no_longer_counted_are_refused(comm) -> None:
    """Without samples no block would end, and ranks would train alone to the end of the run."""
    model, optimizer = wrap(comm, PeriodicAverage(16))
    for step in range(2):
        train(model, optimizer, comm.rank, [step])
        for _ in range(5):  # more steps with one gradient
            optimizer.step()
    model.eval()  # as in fine-tuning with the statistics of batch normalization
    train(model, optimizer, comm.rank, range(2, 6))
    with pytest.raises(UsageError, match=r"no tensor with a batch dimension in 10 steps"):
        train(model, optimizer, comm.rank, [6])
    for step in range(20, 40):
        optimizer.set_weight(4)
        train(model, optimizer, comm.rank, [step])


# ---- what is not finite ----


@pytest.mark.parametrize("make", ["Adam", "AdamW", "NAdam", "Adagrad", "RMSprop", "Adadelta"])
@on_ranks(2)
def test_blocks_after_one_that_was_discarded_are_finite(comm, make: str) -> None:
    def inner(model):
        options = {"foreach": False} if make == "Adam" else {}
        return getattr(torch.optim, make)(model.parameters(), 0.01, **options)

    model, optimizer = wrap(comm, PeriodicAverage(16), inner, on_nonfinite="ignore")
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step)).backward()
        if comm.rank == 1 and step == 3:
            model[2].bias.grad[0] = float("nan")
        optimizer.step()
        if step == 3:
            kept = values(model)
    assert len(optimizer.nonfinite) == 1
    assert different_tensors(comm, [model]) == []
    largest = max((a - b).abs().max() for a, b in zip(values(model), kept, strict=True))
    assert 0 < largest < 0.2  # RMSprop begins with large steps


def test_one_may_be_warned_instead() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, PeriodicAverage(4), on_nonfinite="warn")
        start = values(model)
        loss_of(model, batch(comm.rank, 0)).backward()
        model[0].weight.grad[0, 0] = float("inf")
        optimizer.step()
        assert equal(values(model), start)

    with pytest.warns(ResultWarning, match="pseudo-gradients of a block were not finite"):
        run_ranks(rank_main, 1)


@on_ranks(2)
def test_a_pending_block_that_is_not_finite_stays_so_in_the_state(comm) -> None:
    model, optimizer = wrap(comm, PeriodicAverage(8, overlap_steps=2), on_nonfinite="ignore")
    start = values(model)
    loss_of(model, batch(comm.rank, 0)).backward()
    model[0].weight.grad.mul_(float("nan") if comm.rank else 1.0)
    optimizer.step()
    state = optimizer.state_dict()
    _, resumed = wrap(comm, PeriodicAverage(8, overlap_steps=2), on_nonfinite="ignore")
    again = mlp()
    resumed = create_multi_node_optimizer(
        sgd(again), comm, again, schedule=PeriodicAverage(8, overlap_steps=2)
    )
    resumed.load_state_dict(state)
    with pytest.raises(NonFiniteGradientError, match="rank 1: 0.weight"):
        resumed.flush()
    assert equal(values(again), start)


# ---- what users do around it ----


def scaled_steps(comm, model, optimizer, overflows: Callable[[int], bool]) -> float:
    """Four steps with a GradScaler, which leaves out those that overflow; its scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(comm.rank, step))).backward()
        if overflows(step):
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@on_ranks(2)
def test_a_grad_scaler_decides_for_its_rank(comm) -> None:
    """Rank 1 leaves out its second step; the block ends with its third."""
    model, optimizer = wrap(comm, PeriodicAverage(16))
    scale = scaled_steps(comm, model, optimizer, lambda step: comm.rank == 1 and step == 1)
    assert scale == [8.0, 4.0][comm.rank]
    assert optimizer.nonfinite == []
    optimizer.flush()
    assert different_tensors(comm, [model]) == []


@on_ranks(2)
def test_a_scaler_that_skips_the_last_step_of_the_warmup(comm) -> None:
    model, optimizer = wrap(comm, Warmup(16, PeriodicAverage(16)), on_nonfinite="ignore")
    scaled_steps(comm, model, optimizer, lambda step: step == 1)
    assert different_tensors(comm, [model]) == []
    assert optimizer.schedule.is_over
    assert optimizer.schedule.schedule.num_samples == 16


@on_ranks(2)
def test_parameters_may_come_later(comm) -> None:
    """The partial block ends, momenta of the others stay."""
    model = mlp()
    inner = torch.optim.SGD(model[2].parameters(), 0.1)
    schedule = DiLoCo(16)
    optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule)
    train(model, optimizer, comm.rank, range(3))
    state = {a: dict(s) for a, s in schedule.outer.state.items()}
    optimizer.add_param_group({"params": list(model[0].parameters())})
    assert different_tensors(comm, [model]) == []
    assert len(schedule.anchors) == 4
    assert state
    assert all(schedule.outer.state[a]["momentum_buffer"] is not None for a in state)
    before = values(model[0])
    train(model, optimizer, comm.rank, range(2))
    assert different_tensors(comm, [model]) == []
    assert not equal(values(model[0]), before)


@on_ranks(2)
def test_buffers_stay_the_ranks_own(comm) -> None:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(3, dtype=torch.float64))
    optimizer = create_multi_node_optimizer(sgd(model), comm, model, schedule=PeriodicAverage(8))
    train(model, optimizer, comm.rank, [0])
    assert different_tensors(comm, [model]) == ["1.running_mean", "1.running_var"]


ODD: dict[str, list[torch.Tensor]] = {
    "channels_last": [torch.ones(2, 3, 3, 3).to(memory_format=torch.channels_last)],
    "complex": [torch.ones(3, 2, dtype=torch.complex64)],
    "mixed": [torch.ones(3, dtype=torch.float16), torch.ones(2, 2)],
    "scalar_and_empty": [torch.ones(()), torch.ones(0, 3), torch.ones(5)],
}


@pytest.mark.parametrize("layout", ODD)
@on_ranks(2)
def test_odd_parameters(comm, layout: str) -> None:
    model = nn.ParameterList([nn.Parameter(tensor.clone()) for tensor in ODD[layout]])
    schedule = DiLoCo(2, outer=lambda parameters: torch.optim.SGD(parameters, 1.0))
    optimizer = create_multi_node_optimizer(sgd(model), comm, model, schedule=schedule)
    optimizer.set_weight(1)
    sum((p * (comm.rank + 1)).abs().sum().float() for p in model).backward()
    optimizer.step()
    for p in model:
        assert torch.allclose(p, torch.full_like(p, 1 - 0.1 * 1.5), rtol=1e-3), p


# ---- options ----


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block_size": 0}, "block_size=0 must be above 0"),
        ({"block_size": float("inf")}, "block_size=inf must be above 0"),
        ({"overlap_steps": -1}, "overlap_steps=-1 must be 0 or more"),
        ({"num_fragments": 0}, "num_fragments=0 must be 1 or more"),
        ({"intra_node": "always"}, "intra_node='always' must be 'every_step' or None"),
    ],
)
@pytest.mark.parametrize("make", SCHEDULES)
def test_invalid_values(make: type, options: dict, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make(**options)


@on_ranks(2)
def test_invalid_values_for_this_world(comm) -> None:
    with pytest.raises(UsageError, match="less than one for each of the 2 workers"):
        wrap(comm, PeriodicAverage(1))
    with pytest.raises(UsageError, match="num_fragments=5, but 4 parameters are trained"):
        wrap(comm, PeriodicAverage(8, num_fragments=5))


@on_ranks(2)
def test_two_exchanges_at_a_time_are_rejected_over_mpi(comm) -> None:
    comm.world.transport.is_concurrent = False  # as MPI
    with pytest.raises(UnsupportedError, match="one thread at a time. Use overlap_steps=0"):
        wrap(comm, PeriodicAverage(8, intra_node="every_step", overlap_steps=1))
