"""Ranks without a backward pass take over what the script made of the gradients of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from tests.unit.models import (
    batch,
    equal,
    loss_of,
    mean_grads,
    mlp,
    near,
    optimizer_of,
    sgd,
    values,
    wrap,
)
from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.errors import CommunicationError, RankMismatchError, ResultWarning, UsageError
from torchmn.exchange.schedules import EveryStep, PeriodicAverage, Warmup
from torchmn.testing import run_ranks

NUM_ROWS = (6, 1, 7, 2, 0, 5)
"""Of the global batches, so that there is none, one and more than one late rank among three."""
Change = Callable[[nn.Module], object]


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def clear_first(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def keep(model: nn.Module) -> None:
    pass


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, change: Change, rank: int, size: int
) -> None:
    """Steps with the rank's rows of each global batch."""
    for step, num_rows in enumerate(NUM_ROWS):
        if not num_rows:
            continue
        own = batch(0, step, num_rows)[rank::size]
        optimizer.zero_grad()
        if len(own):
            loss_of(model, own).backward()
        change(model)
        optimizer.step()


@pytest.mark.parametrize("change", [clip, replace, clear_first, keep])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_as_one_process(world_size: int, change: Change) -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, weight="samples")
        train(model, optimizer, change, comm.rank, comm.size)
        optimizer.flush()
        return values(model)

    alone = mlp()
    train(alone, sgd(alone), change, 0, 1)
    results = run_ranks(rank_main, world_size)
    assert all(equal(result, results[0]) for result in results)
    assert near(results[0], values(alone))


@pytest.mark.parametrize("schedule", ["every_step", "warmup"])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_grad_scaler(world_size: int, unscales: bool, schedule: str) -> None:
    """It leaves out the same steps on all ranks, with gradients of one rank alone as well."""

    def train_scaled(model, optimizer, rank=0, size=1):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        scales = []
        for step, num_rows in enumerate((6, 1, 1, 1, 2, 5)):
            whole = batch(0, step, num_rows, dtype=torch.float32)
            own = whole[rank::size] * (float("inf") if step in (1, 2) else 1)
            model.zero_grad()  # the schedule is not notified of this, as by the optimizer's own
            if len(own):
                scaler.scale(loss_of(model, own)).backward()
            else:
                optimizer.skip_backward()
            if unscales:
                scaler.unscale_(optimizer)
                clip(model)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, values(model)

    def rank_main(comm):
        model = mlp(dtype=torch.float32)
        chosen = Warmup(8, EveryStep()) if schedule == "warmup" else schedule
        optimizer = optimizer_of(comm, model, schedule=chosen, weight="samples")
        found = train_scaled(model, optimizer, comm.rank, comm.size)
        optimizer.flush()
        return found

    alone = mlp(dtype=torch.float32)
    scales, expected = train_scaled(alone, sgd(alone))
    assert scales[:3] == [64.0, 32.0, 16.0]
    results = run_ranks(rank_main, world_size)
    assert all(found == scales and equal(held, results[0][1]) for found, held in results)
    assert near(results[0][1], expected, 1e-5)


@pytest.mark.parametrize("unscales", [False, True])
@on_ranks(2)
def test_a_grad_scaler_on_a_rank_without_gradients_is_refused(comm, unscales: bool) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = optimizer_of(comm, model, weight="samples")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.zeros(()))
    if comm.rank == 0:
        scaler.scale(loss_of(model, batch(0, 0, 2, dtype=torch.float32))).backward()
        return
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(UsageError, match=r"rank 1 of 2.*optimizer.skip_backward\(\) in place"):
        scaler.step(optimizer)
    optimizer.skip_backward()


def test_to_ask_whether_a_step_unscales_exchanges_nothing() -> None:
    """Libraries may ask more often than a GradScaler, which asks once in a step."""

    def rank_main(comm):
        model = mlp(dtype=torch.float32)
        optimizer = create_multi_node_optimizer(sgd(model), comm, model, weight="samples")
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.zeros(()))  # it has no scale before
        for step in range(3):
            optimizer.zero_grad()
            if comm.rank == step % 2:
                own = batch(0, step, dtype=torch.float32) * (float("inf") if step == 1 else 1)
                scaler.scale(loss_of(model, own)).backward()
            else:
                optimizer.skip_backward()
            asked = [optimizer._step_supports_amp_scaling for _ in range(3)]
            assert asked == [False] * 3
            scaler.step(optimizer)
            asked = [optimizer._step_supports_amp_scaling for _ in range(3)]
            scaler.update()
        assert optimizer.reducer.num_passes == 3
        return scaler.get_scale(), values(model)

    first, second = run_ranks(rank_main, 2)
    assert first[0] == second[0] == 32.0
    assert equal(first[1], second[1])


@pytest.mark.parametrize("schedule", ["every_step", "double_buffering", "diloco"])
def test_a_rank_that_skips_its_backward_pass_adds_nothing(schedule: str) -> None:
    """Means are those of the ranks that had one, without a word about it from the scripts."""

    def rank_main(comm, *, skips):
        model, optimizer = wrap(comm, schedule=schedule)
        for step in range(4):
            optimizer.zero_grad()
            if skips and comm.rank == 1:
                optimizer.skip_backward()
            else:
                optimizer.set_weight(float(comm.rank != 1))
                loss_of(model, batch(comm.rank, step)).backward()
            clip(model)
            optimizer.step()
        optimizer.flush()
        return values(model)

    expected = run_ranks(lambda comm: rank_main(comm, skips=False), 3)
    results = run_ranks(lambda comm: rank_main(comm, skips=True), 3)
    if schedule != "diloco":  # there a rank steps by itself, or not at all
        assert all(equal(held, expected[0]) for held in results)
    assert all(equal(held, results[0]) for held in results)


def test_a_rank_that_has_left_its_loop() -> None:
    """It takes part in what the others share, and the late one of them gets the gradients."""

    def rank_main(comm):
        model, optimizer = wrap(comm, weight="samples")
        with optimizer.join():
            for step in range(4 if comm.rank else 1):
                optimizer.zero_grad()
                if comm.rank != 1:
                    loss_of(model, batch(comm.rank, step)).backward()
                clip(model)
                optimizer.step()
            return values(model)  # before join copies them to all ranks

    _, late, other = run_ranks(rank_main, 3)
    assert equal(late, other)


def test_a_closure() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, weight="samples")

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch(comm.rank, 0))
            if comm.rank == 0:
                loss.backward()
            else:
                optimizer.set_weight(0)
            clip(model)
            return loss

        optimizer.step(closure)
        return values(model)

    alone = mlp()
    optimizer = sgd(alone)
    loss_of(alone, batch(0, 0)).backward()
    clip(alone)
    optimizer.step()
    for result in run_ranks(rank_main, 2):
        assert near(result, values(alone))


def test_sparse_gradients() -> None:
    def rank_main(comm):
        model = nn.Embedding(5, 2, sparse=True).double()
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = optimizer_of(comm, model, weight="samples")
        if comm.rank == 0:
            model(torch.tensor([1, 3, 3])).sum().backward()
            model.weight.grad *= 0.5
        else:
            optimizer.set_weight(0)
        optimizer.step()
        return [model.weight.detach().clone()]

    expected = torch.ones(5, 2, dtype=torch.float64)
    expected[1] -= 0.05
    expected[3] -= 0.1
    for result in run_ranks(rank_main, 2, is_trusted=False):  # nothing of it is pickled
        assert near(result, [expected])


@pytest.mark.parametrize("change", [clip, replace])
def test_double_buffering_refuses_it(change: Change) -> None:
    """Whether a rank was late is known one step later there."""

    def rank_main(comm):
        model, optimizer = wrap(comm, schedule="double_buffering", weight="samples")
        train(model, optimizer, change, comm.rank, comm.size)

    with pytest.raises(RankMismatchError, match="max_grad_norm"):
        run_ranks(rank_main, 2)


@on_ranks(2)
def test_double_buffering_with_unchanged_gradients(comm):
    model, optimizer = wrap(comm, schedule="double_buffering", weight="samples", max_grad_norm=0.01)
    train(model, optimizer, keep, comm.rank, comm.size)
    optimizer.flush()
    return values(model)


def accumulate(optimizer, model: nn.Module, parts) -> None:
    """All passes but the last under no_sync(); the last one is left out if its part is empty."""
    optimizer.zero_grad()
    for index, part in enumerate(parts):
        with nullcontext() if index == len(parts) - 1 else optimizer.no_sync():
            if len(part):
                loss_of(model, part).backward()


@pytest.mark.parametrize("change", [clip, replace])
@on_ranks(2)
def test_a_last_pass_that_is_left_out_after_others(comm, change: Change):
    """What the script changes is the rank's own gradient then: all ranks refuse it."""
    model, optimizer = wrap(comm)
    parts = [batch(comm.rank, 0), batch(comm.rank, 1, size=0 if comm.rank == 1 else 4)]
    accumulate(optimizer, model, parts)
    change(model)
    with pytest.raises(RankMismatchError, match=r"on rank 1 gradients were changed"):
        optimizer.step()
    accumulate(optimizer, model, parts)  # without a change it is right
    optimizer.step()
    return values(model)


def double(parameter: torch.Tensor) -> None:
    parameter.grad *= 2


def pass_under_no_sync_and_step(comm, change: Change, hook: Callable | None = None) -> None:
    model, optimizer = wrap(comm)
    for parameter in model.parameters() if hook else ():
        parameter.register_post_accumulate_grad_hook(hook)
    with optimizer.no_sync():
        loss_of(model, batch(comm.rank, 0)).backward()
    change(model)
    optimizer.step()


def test_all_passes_under_no_sync_then_a_change() -> None:
    with pytest.warns(ResultWarning, match="under no_sync"):
        run_ranks(partial(pass_under_no_sync_and_step, change=clip), 2)
    run_ranks(partial(pass_under_no_sync_and_step, change=keep, hook=double), 2)


def train_both(
    model: nn.Module,
    optimizers,
    change: Change,
    rank: int,
    size: int,
    *,
    takes_empty: bool = False,
    num_rows: Sequence[int] = (6, 1, 7, 1, 5),
):
    """Both optimizers step after one backward pass."""
    for step, num in enumerate(num_rows):
        own = batch(0, step, num)[rank::size]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if len(own) or takes_empty:
            loss_of(model, own).backward()
        change(model)
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        getattr(optimizer, "flush", lambda: None)()
    return values(model)


def both(comm, model: nn.Module):
    """In the order in which a backward pass reaches their layers."""
    return [
        create_multi_node_optimizer(sgd(part), comm, part, weight="samples")
        for part in (model[2], model[0])
    ]


def test_two_optimizers_of_one_backward_pass_with_batches_of_0_rows() -> None:
    def rank_main(comm, *, is_reversed):
        model = mlp()
        optimizers = both(comm, model)
        if is_reversed:
            optimizers.reverse()
        return train_both(model, optimizers, clip, comm.rank, comm.size, takes_empty=True)

    alone = mlp()
    train_both(alone, [sgd(alone[2]), sgd(alone[0])], clip, 0, 1)
    for is_reversed in (False, True):
        for result in run_ranks(partial(rank_main, is_reversed=is_reversed), 2):
            assert near(result, values(alone))


@pytest.mark.parametrize(
    ("before", "late", "call"),
    [
        ("nothing", 0, "step"),
        ("a pass of both", 0, "step"),
        ("a pass of both", 0, "skip_backward"),
        ("the fold before", 0, "step"),
        ("a pass of one, when the other was made", 0, "step"),
        ("a pass of one, when the other was made", 1, "step"),
    ],
)
@on_ranks(2)
def test_two_optimizers_of_one_backward_pass_refuse_late_ranks(
    comm, before: str, late: int, call: str
) -> None:
    """Others come in an order of their own; a pass of other models or of one says nothing."""
    model = mlp()
    if before == "the fold before":
        train_both(model, both(comm, model), keep, 0, 1)
        model = mlp()
    if before.startswith("a pass of one"):
        optimizers = [optimizer_of(comm, model[0])]
        train_both(model, optimizers, keep, comm.rank, comm.size, num_rows=(4,))
        optimizers.append(optimizer_of(comm, model[2]))
    else:
        optimizers = both(comm, model)
    if before == "a pass of both":
        train_both(model, optimizers, keep, comm.rank, comm.size, num_rows=(8,))
    for optimizer in optimizers:
        optimizer.zero_grad()
    if comm.rank == 1:
        with pytest.raises(UsageError, match=r"rank 1 of 2.*share a backward pass.*0 rows"):
            getattr(optimizers[late], call)()


@on_ranks(2)
def test_an_optimizer_beside_one_that_was_made_later_may_be_late(comm):
    """Once either has had a pass of its own."""
    model, other = mlp(), mlp()
    optimizers = [optimizer_of(comm, model), optimizer_of(comm, other)]
    for step in range(3):
        for each, optimizer in zip((model, other), optimizers, strict=True):
            optimizer.zero_grad()
            if comm.rank == 0 or not step:
                loss_of(each, batch(0, step)).backward()
            else:
                optimizer.set_weight(0)
            optimizer.step()
    return [*values(model), *values(other)]


def test_an_optimizer_in_place_of_one_that_had_no_pass_may_be_late() -> None:
    """As in a notebook whose cell is run twice: the first optimizer shares no pass any more."""

    def rank_main(comm):
        model = mlp()
        create_multi_node_optimizer(sgd(model), comm, model)
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        if comm.rank == 0:
            loss_of(model, batch(0, 0)).backward()
        optimizer.step()
        return values(model)

    with pytest.warns(ResultWarning, match="without backward"):
        results = run_ranks(rank_main, 2)
    assert equal(results[0], results[1])


def test_two_optimizers_of_one_backward_pass_of_which_one_rank_takes_old_gradients() -> None:
    """It exchanges them in `step`, in the order of the others, which all ranks then refuse."""

    def rank_main(comm):
        model = mlp()
        optimizers = both(comm, model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if comm.rank == 0:
            loss_of(model, batch(comm.rank, 0)).backward()
        optimizers[0].step()

    with pytest.raises(RankMismatchError, match=r"share a backward pass.*0 rows"):
        run_ranks(rank_main, 2)


def test_gradients_assigned_by_hand_beside_an_earlier_optimizer() -> None:
    """No backward pass accumulates them: `step` exchanges them, and no pass is shared."""

    def train(model, optimizer, rank, size):
        for step in range(3):
            loss = loss_of(model, batch(0, step)[rank::size])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            optimizer.zero_grad()
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        return values(model)

    def rank_main(comm):
        other, model = mlp(), mlp()
        earlier = create_multi_node_optimizer(sgd(other), comm, other)
        loss_of(other, batch(comm.rank, 0)).backward()
        earlier.step()
        optimizer = create_multi_node_optimizer(sgd(model), comm, model, weight="samples")
        return train(model, optimizer, comm.rank, comm.size)

    alone = mlp()
    train(alone, sgd(alone), 0, 1)
    for result in run_ranks(rank_main, 2):
        assert near(result, values(alone))


def test_two_optimizers_of_one_backward_pass_of_which_one_has_none_later() -> None:
    """On all ranks, so that it is late on all of them."""

    def train(model, optimizers, rank, size):
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            hidden = model[1](model[0](batch(0, step)[rank::size]))
            loss_of(model[2], hidden if step % 2 == 0 else hidden.detach()).backward()
            for optimizer in optimizers:
                optimizer.step()
        return values(model)

    def rank_main(comm):
        model = mlp()
        return train(model, both(comm, model), comm.rank, comm.size)

    alone = mlp()
    train(alone, [sgd(alone[2]), sgd(alone[0])], 0, 1)
    for result in run_ranks(rank_main, 2):
        assert near(result, values(alone))


def test_equal_parts_that_ranks_reach_in_different_orders_are_refused() -> None:
    """Each rank trains another head, so that the sums of the heads would be of both."""

    def rank_main(comm):
        trunk, heads = mlp(), [nn.Linear(3, 2).double(), nn.Linear(3, 2).double()]
        optimizers = [optimizer_of(comm, each) for each in (trunk, *heads)]
        outputs = trunk(batch(comm.rank, 0))
        heads[comm.rank](outputs).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    with pytest.raises(CommunicationError, match="gradients of different optimizers"):
        run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    "after", [lambda: PeriodicAverage(24), EveryStep], ids=["periodic_average", "every_step"]
)
@pytest.mark.filterwarnings("ignore:(.|\n)*called step\\(\\) without backward")
@pytest.mark.parametrize("route", ["flat", "single_node"])
def test_a_rank_that_is_late_when_the_warm_up_ends(after: type, route: str) -> None:
    """Rank 1 has no backward pass in the step whose samples end it."""

    def rank_main(comm):
        model, made = mlp(), Warmup(20, after())
        optimizer = optimizer_of(comm, model, schedule=made, codec="float16")
        seen = []
        for step in range(8):
            optimizer.zero_grad()
            if not (comm.rank == 1 and step == 2):
                loss_of(model, batch(comm.rank, step, 4)).backward()
            clip(model)
            optimizer.step()
            seen.append(values(model))
        optimizer.flush()
        return seen[:3], values(model), made.num_samples

    first, second = run_ranks(rank_main, 2, name=route, topology=Topology.blocks([2]))
    assert first[2] == second[2]
    for ours, theirs in zip(first[0], second[0], strict=True):
        assert equal(ours, theirs)
    assert equal(first[1], second[1])


COUNTS_ZEROS = "rank 1 of 3.*called step\\(\\) without backward(.|\n)*weight 1(.|\n)*set_weight"


@pytest.mark.parametrize("schedule", ["every_step", "double_buffering", "auto"])
def test_a_rank_that_leaves_backward_out_counts_as_zeros_and_is_told_once(schedule: str) -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, schedule=schedule)
        after_one = None
        for step in range(4):
            optimizer.zero_grad()
            if comm.rank != 1 or step % 2:
                loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            if step == 0:
                optimizer.flush()
                after_one = values(model)
        optimizer.flush()
        return after_one, values(model)

    with pytest.warns(ResultWarning, match=COUNTS_ZEROS) as seen:
        results = run_ranks(rank_main, 3)
    assert len(seen) == 1
    reference = mlp()
    means = mean_grads(reference, (0, 2))  # two thirds of it: rank 1 counts as well
    expected = [v - 0.1 * g * 2 / 3 for v, g in zip(values(reference), means, strict=True)]
    for after_one, after_all in results:
        assert near(after_one, expected)
        assert equal(after_all, results[0][1])


@pytest.mark.parametrize("case", ["weight 0", "no batch counted", "sum", "all late", "by hand"])
@on_ranks(2)
def test_a_rank_that_may_leave_backward_out_is_told_nothing(comm, case: str) -> None:
    """Warnings are errors in all tests."""
    model = mlp()
    options = {"no batch counted": {"weight": "samples"}, "sum": {"reduction": "sum"}}
    optimizer = optimizer_of(comm, model, **options.get(case, {}))
    for step in range(3):
        optimizer.zero_grad()
        is_left_out = case == "all late" or (comm.rank == 1 and step == 1)
        if not is_left_out:
            loss_of(model, batch(comm.rank, step)).backward()
        elif case == "weight 0":
            optimizer.set_weight(0)
        elif case == "by hand":
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
