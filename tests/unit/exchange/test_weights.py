"""Means over samples or tokens, for batches of different sizes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.contracts.suites.communicator_contracts import seeded
from tests.ranks import on_ranks
from tests.unit.models import (
    batch,
    equal,
    fill,
    grads,
    local_grads,
    loss_of,
    mlp,
    near,
    optimizer_of,
    sgd,
    values,
    wrap,
)
from torchmn import create_multi_node_optimizer
from torchmn.errors import UsageError
from torchmn.exchange.agreements.weights import weight_scale
from torchmn.testing import run_ranks


@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
@on_ranks(2)
def test_samples_do_not_push_gradients_out_of_range(comm, codec: str) -> None:
    """Gradients of 30000 times 64 samples do not fit in float16, but their mean does."""
    model = nn.Linear(1, 1, bias=False)
    fill(model)
    optimizer_of(comm, model, codec=codec, weight="samples")
    size = 64 if comm.rank == 0 else 16
    model(torch.full((size, 1), 30000.0 if comm.rank == 0 else 10000.0)).mean().backward()
    assert float(model.weight.grad) == pytest.approx(26000, rel=1e-2)


@on_ranks(2)
def test_half_precision_parameters_with_samples(comm) -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    fill(model)
    optimizer_of(comm, model, weight="samples")
    x = torch.full((32, 1), 40000.0, dtype=torch.float16)
    (model(x) / 32).sum().backward()
    assert float(model.weight.grad) == pytest.approx(40000, rel=1e-2)


@pytest.mark.parametrize("codec", [None, "float16"])
@on_ranks(3, name="hierarchical")
def test_weights_that_are_zero_everywhere_as_nothing_was_counted(comm, codec: str | None):
    """The same error on all ranks, which may then continue with the next batch."""
    model = mlp(dtype=torch.float32)
    optimizer = optimizer_of(comm, model, weight="samples", codec=codec)
    for step in range(4):
        optimizer.zero_grad()
        model.train(step % 2 == 1)  # what is evaluated is not counted
        loss = loss_of(model, batch(comm.rank, step, comm.rank + 1, torch.float32))
        if step % 2 == 0:
            with pytest.raises(UsageError, match="weights of all ranks are zero.*set_weight"):
                loss.backward()
            continue
        loss.backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("schedule", ["every_step", "auto"])
def test_a_second_step_with_the_same_gradients_needs_the_weight_that_is_advised(
    schedule: str,
) -> None:
    def train(model, optimizer, rank, size, before_second_step):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(0, step, 6)[rank::size]).backward()
            optimizer.step()
            before_second_step(optimizer)
            optimizer.step()
        return values(model)

    def rank_main(comm, before_second_step):
        model, optimizer = wrap(comm, weight="samples", schedule=schedule)
        return train(model, optimizer, comm.rank, comm.size, before_second_step)

    with pytest.raises(UsageError, match=r"another step\(\).*optimizer.set_weight\(1\)"):
        run_ranks(partial(rank_main, before_second_step=lambda _: None), 2)
    alone = mlp()
    expected = train(alone, sgd(alone), 0, 1, lambda _: None)
    for result in run_ranks(
        partial(rank_main, before_second_step=lambda each: each.set_weight(1)), 2
    ):
        assert near(result, expected)


@pytest.mark.parametrize("codec", [None, "float16", "1bit", "power_sgd"])
def test_a_weight_of_zero_that_all_ranks_set_gives_gradients_of_zero(codec: str | None) -> None:
    """As in one process; even of a loss that is NaN. What a codec has kept back stays for later."""

    def trained(comm, *, has_empty_batches):
        model = mlp(dtype=torch.float32)
        optimizer = optimizer_of(comm, model, momentum=0, codec=codec)
        for step in range(6):
            is_empty = step % 2 == 1
            if is_empty and not has_empty_batches:
                continue
            optimizer.zero_grad()
            loss = loss_of(model, batch(comm.rank, step, 2, torch.float32))
            optimizer.set_weight(0 if is_empty else 100)
            (loss * float("nan") if is_empty else loss).backward()
            assert not is_empty or all(not p.grad.any() for p in model.parameters())
            optimizer.step()
        return values(model)

    expected = run_ranks(partial(trained, has_empty_batches=False), 3, name="hierarchical")
    results = run_ranks(partial(trained, has_empty_batches=True), 3, name="hierarchical")
    for result in results:
        assert equal(result, results[0])
        assert equal(result, expected[0])


@pytest.mark.parametrize("schedule", ["double_buffering", "periodic_average", "diloco"])
def test_weights_of_zero_under_other_schedules(schedule: str) -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, schedule=schedule)
        for step in range(5):
            optimizer.zero_grad()
            optimizer.set_weight(0 if step in (1, 2) else 3)
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
        optimizer.flush()
        return values(model)

    first, second = run_ranks(rank_main, 2)
    assert equal(first, second)
    assert all(value.isfinite().all() for value in first)


@on_ranks(2)
def test_a_closure_whose_batch_has_weight_zero_on_all_ranks(comm) -> None:
    model = mlp()
    lbfgs = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
    optimizer = create_multi_node_optimizer(lbfgs, comm, model)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch(comm.rank, 0)) * 0.0
        loss.backward()
        return loss

    optimizer.set_weight(0)
    before = values(model)
    assert float(optimizer.step(closure)) == 0
    assert equal(values(model), before)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
@on_ranks(1)
def test_weights_that_are_none_are_refused(comm, weight: float) -> None:
    model, optimizer = wrap(comm)
    with pytest.raises(UsageError, match="must be a non-negative finite number"):
        optimizer.set_weight(weight)


class Quadratic(torch.optim.SGD):
    """Calls its closure twice and keeps what it returned."""

    def step(self, closure):
        self.losses = [float(closure()) for _ in range(2)]
        super().step()


@pytest.mark.parametrize("how", ["samples", "given before step", "given in the closure"])
def test_the_loss_of_a_closure_is_weighted_as_its_gradient(how: str) -> None:
    sizes = (1, 5, 0)

    def rank_main(comm):
        model, size = mlp(), sizes[comm.rank]
        inner = Quadratic(model.parameters(), 0.0)
        weight = "samples" if how == "samples" else "rank"
        optimizer = create_multi_node_optimizer(inner, comm, model, weight=weight)

        def closure():
            optimizer.zero_grad()
            if how == "given in the closure":
                optimizer.set_weight(size)
            loss = loss_of(model, batch(comm.rank, 1, size))  # the mean of nothing is NaN
            loss.backward()
            return loss.detach() if comm.rank == 0 else loss.item()

        if how == "given before step":
            optimizer.set_weight(size)
        optimizer.step(closure)
        return inner.losses, grads(model)

    model = mlp()
    together = torch.cat([batch(rank, 1, size) for rank, size in enumerate(sizes)])
    expected = float(loss_of(model, together).detach())
    for losses, gradients in run_ranks(rank_main, 3):
        assert losses == pytest.approx([expected, expected], rel=1e-12)
        assert near(gradients, local_grads(model, together))


@pytest.mark.parametrize(
    ("sizes", "is_refused"),
    [([(4, 2), (2, 1)], False), ([(3, 3), (3, 3)], False), ([(4, 3), (4, 2)], True)],
)
def test_weights_of_accumulated_passes_are_in_proportion_or_refused(
    sizes: list[tuple[int, int]], is_refused: bool
) -> None:
    """As of tokens in micro-batches: under `no_sync` a rank has one weight for all passes."""
    rows = [[batch(rank, step, size) for step, size in enumerate(own)] for rank, own in
            enumerate(sizes)]  # fmt: skip

    def rank_main(comm):
        model, optimizer = wrap(comm)
        first, last = rows[comm.rank]
        with optimizer.no_sync():
            optimizer.set_weight(len(first))
            loss_of(model, first).backward()
        optimizer.set_weight(len(last))
        if is_refused:
            with pytest.raises(UsageError, match="not in proportion on all ranks: rank 0 4 and 3"):
                loss_of(model, last).backward()
            return []
        loss_of(model, last).backward()
        optimizer.step()
        return values(model)

    alone = mlp()
    optimizer = sgd(alone)
    for own in zip(*rows, strict=True):
        loss_of(alone, torch.cat(own)).backward()
    optimizer.step()
    for result in run_ranks(rank_main, 2):
        assert is_refused or near(result, values(alone))


def test_the_unit_of_weights() -> None:
    assert [weight_scale(t, 1) for t in (1, 2, 3, 4, 0.5, 0.3)] == [1, 2, 4, 4, 0.5, 0.5]
    assert weight_scale(3, 3) == 1.0
    assert weight_scale(0, 2) == weight_scale(5, 0) == 1.0
    for total, num_active in [(1000.0, 3), (1e-9, 1), (7.0, 7)]:
        unit = weight_scale(total, num_active)
        assert unit / 2 < total / num_active <= unit


@on_ranks(2)
def test_an_infinite_gradient_of_an_empty_batch_is_not_exchanged(comm) -> None:
    model, optimizer = wrap(comm)
    optimizer.set_weight(1 - comm.rank)
    x = seeded(0, 2, 5) / 10
    loss_of(model, x if comm.rank == 0 else x * float("inf")).backward()
    assert near(grads(model), local_grads(model, x))
