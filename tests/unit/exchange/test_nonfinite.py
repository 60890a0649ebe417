"""Gradients that are not finite: refused on all ranks, or left out by a GradScaler."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from tests.unit.models import batch, equal, fill, loss_of, mlp, optimizer_of, values
from torchmn import create_multi_node_optimizer
from torchmn.errors import NonFiniteGradientError
from torchmn.testing import run_ranks

CODECS = [None, "float16", "int8", "1bit", "power_sgd"]


def wrap(comm, **options):
    model = nn.Sequential(fill(nn.Linear(40, 40)), fill(nn.Linear(40, 2)))
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, create_multi_node_optimizer(inner, comm, model, **options)


def backward(model, comm, step: int, factor: float = 1.0, scaler=None) -> None:
    generator = torch.Generator().manual_seed(100 * step + comm.rank)
    loss = model(torch.randn(4, 40, generator=generator) / 40).pow(2).mean() * factor
    (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.mark.parametrize("codec", CODECS)
def test_a_grad_scaler_leaves_the_step_out_everywhere(codec) -> None:
    def rank_main(comm):
        trained = []
        for bad_step in (2, None):
            model, optimizer = wrap(comm, codec=codec)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
            for step in (0, 1, 2, 3):
                if step == 2 and bad_step is None:
                    scaler.update(scaler.get_scale() * 0.5)
                    continue
                optimizer.zero_grad()
                factor = float("inf") if step == bad_step and comm.rank == 1 else 1.0
                backward(model, comm, step, factor, scaler)
                scaler.step(optimizer)
                scaler.update()
            trained.append([p.detach().clone() for p in model.parameters()])
            assert len(optimizer.nonfinite) == (bad_step is not None)
        assert scaler.get_scale() == 4.0
        assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
        return optimizer.nonfinite

    run_ranks(rank_main, 2)


@pytest.mark.filterwarnings("ignore:(.|\\n)*not finite")  # ranks are threads: seen by `caught`
@pytest.mark.parametrize(("choice", "num_warnings"), [("warn", 2), ("ignore", 0)])
def test_warn_and_ignore_still_step(choice: str, num_warnings: int) -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, on_nonfinite=choice)
        backward(model, comm, 0, float("inf"))
        optimizer.step()
        assert not model[0].weight.isfinite().all()
        assert len(optimizer.nonfinite) == 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(rank_main, 2)
    texts = [str(w.message) for w in caught if "were not finite" in str(w.message)]
    assert len(texts) == num_warnings


@on_ranks(1, 2)
def test_large_gradients_whose_sum_overflows_are_fine(comm) -> None:
    model = fill(nn.Linear(2000, 1, bias=False))
    optimizer = optimizer_of(comm, model, lr=1e-30)
    (model(torch.ones(1, 2000)).sum() * 1e36).backward()
    assert torch.equal(model.weight.grad, torch.full((1, 2000), 1e36))
    optimizer.step()
    assert optimizer.nonfinite == []


@on_ranks(2)
def test_what_float16_cannot_hold_names_the_rank_that_sent_it(comm) -> None:
    model, optimizer = wrap(comm, codec="float16")
    backward(model, comm, 0, 1e9 if comm.rank == 1 else 1.0)
    with pytest.raises(NonFiniteGradientError, match="rank 1: "):
        optimizer.step()
    assert list(optimizer.nonfinite[0].by_rank) == [1]


@pytest.mark.parametrize("has_closure", [False, True])
@on_ranks(1)
def test_one_rank_alone_refuses_too(comm, has_closure: bool) -> None:
    model = mlp()
    optimizer = optimizer_of(comm, model)
    before = values(model)

    def closure(scale=float("inf")):
        optimizer.zero_grad()
        loss = loss_of(model, batch(comm.rank, 0)) * scale
        loss.backward()
        return loss

    if not has_closure:
        closure()
    with pytest.raises(NonFiniteGradientError, match=r"rank 0: 0\.weight"):
        optimizer.step(closure if has_closure else None)
    assert equal(values(model), before)
    assert [sorted(problem.by_rank) for problem in optimizer.nonfinite] == [[0]]
    closure(1.0)
    optimizer.step()
    assert not equal(values(model), before)


@on_ranks(1)
def test_one_rank_alone_refuses_what_other_parts_refuse(
    comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer = optimizer_of(comm, model)
    mesh = optimizer.reducer.parameters.mesh
    monkeypatch.setattr(mesh, "any", lambda flag: True)  # as if another rank had found some
    loss_of(model, batch(0, 0)).backward()
    with pytest.raises(NonFiniteGradientError, match="a part of the model that another rank"):
        optimizer.step()
    assert [problem.by_rank for problem in optimizer.nonfinite] == [{}]


@on_ranks(2)
def test_a_closure_is_clipped_and_refused_before_its_step(comm) -> None:
    model = mlp()
    optimizer = optimizer_of(comm, model, lr=1.0, max_grad_norm=1e-3)
    before = values(model)

    def closure(scale=1.0):
        optimizer.zero_grad()
        loss = loss_of(model, batch(comm.rank, 0)) * scale
        loss.backward()
        return loss

    optimizer.step(closure)
    moved = torch.stack([(a - b).norm() for a, b in zip(values(model), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)
    before = values(model)
    with pytest.raises(NonFiniteGradientError):
        optimizer.step(lambda: closure(float("inf") if comm.rank else 1.0))
    assert equal(values(model), before)
