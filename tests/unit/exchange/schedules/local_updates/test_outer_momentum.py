"""Eager blocks: the momentum of the outer step is taken when the exchange starts."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import on_ranks
from tests.unit.exchange.schedules.local_updates.runs import set_values, wrap
from tests.unit.models import batch, equal, local_grads, mlp, near, train, values
from torchmn.exchange.replicas import different_tensors
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, PeriodicAverage
from torchmn.testing import run_ranks

RATE, MOMENTUM = 0.7, 0.8


def nesterov(anchors):
    return torch.optim.SGD(anchors, RATE, momentum=MOMENTUM, nesterov=True)


@pytest.mark.parametrize("k", [1, 2])
def test_against_a_simulation_step_by_step(k: int) -> None:
    """Blocks of 3 steps on 2 ranks; the outer step is written out."""

    def rank_main(comm):
        schedule = DiLoCo(24, outer=nesterov, overlap_steps=k, eager=True)
        model, optimizer = wrap(comm, schedule)
        seen = []
        for step in range(12):
            train(model, optimizer, comm.rank, [step])
            seen.append(values(model))
        return seen

    results = run_ranks(rank_main, 2)
    models = [mlp(), mlp()]
    anchors = values(models[0])
    buffers = [torch.zeros_like(a) for a in anchors]
    pending = None
    for step in range(12):
        for rank, model in enumerate(models):
            parts = local_grads(model, batch(rank, step))
            set_values(model, [p - 0.1 * g for p, g in zip(values(model), parts, strict=True)])
        if pending is not None and step == pending[0]:
            _, means, starts = pending
            buffers = [MOMENTUM * b + d for b, d in zip(buffers, means, strict=True)]
            anchors = [
                a - RATE * (d + MOMENTUM * b)
                for a, d, b in zip(anchors, means, buffers, strict=True)
            ]
            for model, start in zip(models, starts, strict=True):
                kept = zip(anchors, values(model), start, strict=True)
                set_values(model, [a + (w - s) for a, w, s in kept])
            pending = None
        if step % 3 == 2:
            columns = zip(*map(values, models), strict=True)
            means = [a - sum(column) / 2 for a, column in zip(anchors, columns, strict=True)]
            for model in models:
                moved = zip(values(model), buffers, strict=True)
                set_values(model, [w - RATE * MOMENTUM**2 * b for w, b in moved])
            pending = (step + k, means, [values(model) for model in models])
        for rank, model in enumerate(models):
            assert near(results[rank][step], values(model)), (rank, step)


@pytest.mark.parametrize(
    "make",
    [
        lambda eager: DiLoCo(16, overlap_steps=1, eager=eager, outer=nesterov),
        lambda eager: BlockMomentum(16, overlap_steps=1, eager=eager),
        lambda eager: DiLoCo(
            16, overlap_steps=1, eager=eager, outer=lambda a: torch.optim.Adam(a, 0.05)
        ),
    ],
    ids=["nesterov", "block momentum", "adam"],
)
@on_ranks(2)
def test_anchors_move_by_means_alone(comm, make) -> None:
    """The first block is the same with and without; later ones learn from other places."""
    anchors = []
    for eager in (False, True):
        schedule = make(eager)
        model, optimizer = wrap(comm, schedule)
        seen = []
        for step in range(10):
            train(model, optimizer, comm.rank, [step])
            seen.append([a.clone() for a in schedule.anchors.values()])
        optimizer.flush()
        assert different_tensors(comm, [model]) == []
        anchors.append(seen)
        optimizer.close()
    late, eager = anchors
    assert near(late[3], eager[3])
    assert not near(late[9], eager[9])


class Counting(torch.optim.SGD):
    """Keeps counts where torch's own optimizers have none, and slows down with them."""

    num_steps = 0

    def step(self, closure=None):
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        self.num_steps += 1
        for p in group["params"]:
            if p.grad is not None:
                number = self.state[p].setdefault("number", torch.zeros((), dtype=torch.int64))
                number += group["count"] + self.num_steps
                self.state[p]["python number"] = self.state[p].get("python number", 0) + 1
                group["lr"] = 0.7 / (1 + float(number) + self.state[p]["python number"])
        return super().step(closure)


@on_ranks(2)
def test_an_outer_optimizer_knows_nothing_of_it(comm) -> None:
    """Neither its counts nor its hooks nor a learning rate scheduler."""
    counts = []
    for eager in (False, True):
        schedule = DiLoCo(
            16,
            overlap_steps=1,
            eager=eager,
            outer=lambda anchors: Counting(anchors, 0.7, momentum=0.8),
        )
        model, optimizer = wrap(comm, schedule)
        calls = []
        schedule.outer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        train(model, optimizer, comm.rank, range(9))
        optimizer.flush()
        state = schedule.outer.state_dict()
        numbers = [(each["number"], each["python number"]) for each in state["state"].values()]
        group = state["param_groups"][0]
        calls.append(schedule.outer.num_steps)
        counts.append((len(calls), calls[-1], group["count"], group["lr"], numbers))
        optimizer.close()
    assert counts[0] == counts[1]


@pytest.mark.parametrize("options", [{"overlap_steps": 0, "outer": nesterov}, {"outer": None}])
@on_ranks(2)
def test_nothing_changes_without_overlap_or_momentum(comm, options) -> None:
    results = []
    for eager in (False, True):
        schedule = (
            DiLoCo(16, eager=eager, **options)
            if options["outer"]
            else PeriodicAverage(16, overlap_steps=1, eager=eager)
        )
        model, optimizer = wrap(comm, schedule)
        train(model, optimizer, comm.rank, range(9))
        results.append(values(model))
        optimizer.close()
    assert equal(*results)


@on_ranks(2)
def test_a_block_that_is_not_finite_returns_to_its_beginning(comm) -> None:
    schedule = DiLoCo(16, outer=nesterov, overlap_steps=1, eager=True)
    model, optimizer = wrap(comm, schedule, on_nonfinite="ignore")
    train(model, optimizer, comm.rank, range(7))
    anchors = [a.clone() for a in schedule.anchors.values()]
    if comm.rank == 1:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
    train(model, optimizer, comm.rank, [7])
    train(model, optimizer, comm.rank, [8])
    assert all(torch.isfinite(value).all() for value in values(model))
    assert near(anchors, [a.clone() for a in schedule.anchors.values()])
