"""Hooks on a model that no copy of it has."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.models import batch, loss_of, mlp
from torchmn import create_multi_node_optimizer
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.schedules import PeriodicAverage
from torchmn.testing import run_ranks

KINDS = {
    "samples": lambda: {"weight": "samples"},
    "blocks": lambda: {"schedule": PeriodicAverage(block_size=1e6)},
}


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> None:
    """Torch stops to compile a function that other tests have compiled too often."""
    torch.compiler.reset()


def wrap(comm, model, **options):
    inner = torch.optim.SGD(model.parameters(), 0.1)
    return create_multi_node_optimizer(inner, comm, model, **options)


def train(comm, model, optimizer, num_steps=5) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step)).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_open", [True, False])
def test_a_pickled_model_holds_nothing_of_torchmn(kind: str, is_open: bool, tmp_path: Path) -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = wrap(comm, model, **KINDS[kind]())
        train(comm, model, optimizer)
        if not is_open:
            optimizer.close()
        file = io.BytesIO()
        torch.save(model, file)
        train(comm, model, optimizer, is_open)
        return file.getvalue(), pickle.dumps(model)

    saved, pickled = run_ranks(rank_main, 2)[0]
    assert b"torchmn" not in saved
    assert b"torchmn" not in pickled
    (tmp_path / "model.pt").write_bytes(saved)
    load = (
        "import sys; sys.modules['torchmn'] = None; import torch; "
        "model = torch.load(sys.argv[1], weights_only=False); model(torch.ones(2, 5).double())"
    )
    subprocess.run([sys.executable, "-c", load, str(tmp_path / "model.pt")], check=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_computes_the_same_and_counts_nothing(kind: str) -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = wrap(comm, model, **KINDS[kind]())
        train(comm, model, optimizer)
        x = batch(comm.rank, 9)
        copies = [
            copy.deepcopy(model),
            copy.copy(model),
            pickle.loads(pickle.dumps(model)),
            torch.optim.swa_utils.AveragedModel(model),
        ]
        if comm.rank == 0:  # two threads cannot
            copies.append(torch.jit.script(model))
        before = optimizer.reducer.contribution.num_samples
        results = [twin(x) for twin in copies]
        assert optimizer.reducer.contribution.num_samples == before
        for result in results:
            assert torch.equal(result, model(x))
        train(comm, model, optimizer)

    run_ranks(rank_main, 2)


def test_what_is_hidden_is_only_ours() -> None:
    calls = []
    model = nn.Sequential(nn.Linear(5, 3))
    model[0].register_forward_pre_hook(_double)
    hooks = ModelHooks()
    hooks.before_forward(model, lambda module, args, kwargs: calls.append("before"))
    hooks.before_copy(model, lambda: calls.append("copy"))
    x = torch.ones(1, 5)
    twin = copy.deepcopy(model)
    assert calls == ["copy"]
    assert torch.equal(model(x), twin(x))
    assert calls == ["copy", "before"]
    assert torch.equal(twin(x), model[0].forward(2 * x))
    hooks.remove()
    plain = nn.Sequential(nn.Linear(5, 3))
    assert model.__dict__.keys() == plain.__dict__.keys()
    model(x)
    copy.deepcopy(model)
    assert calls == ["copy", "before"]


def test_code_without_the_hooks_is_not_run_for_a_module_that_has_them() -> None:
    """Neither of the same module nor of another one of its structure."""
    calls = []

    def count(module, args, kwargs):
        calls.append(args[0].shape[0])

    x = torch.ones(2, 5)
    torch.compiler.reset()
    model, other = (nn.Sequential(nn.Linear(5, 3)) for _ in range(2))
    compiled, of_other = (torch.compile(m, backend="eager") for m in (model, other))
    compiled(x)
    hooks = ModelHooks()
    hooks.before_forward(model, count)
    hooks.show_to_compiler(model)
    of_other(x)
    compiled(x)
    assert calls == [2]
    of_other(x)
    hooks.remove()
    compiled(x)
    assert calls == [2]


def test_copies_have_the_forward_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    plain = nn.Sequential(nn.Linear(5, 3))
    hooks, again = ModelHooks(), ModelHooks()
    hooks.show_to_compiler(model)
    again.show_to_compiler(model)
    assert model.forward.__self__ is model
    assert "forward" in model.__dict__
    for twin in (copy.deepcopy(model), copy.copy(model), model._replicate_for_data_parallel()):
        own = {"forward", "__getstate__", "_replicate_for_data_parallel"}
        assert not own & twin.__dict__.keys()
        assert twin.forward.__self__ is twin
    hooks.remove()
    assert "forward" in model.__dict__
    again.remove()
    assert model.__dict__.keys() == plain.__dict__.keys()


def test_a_forward_of_the_user_stays() -> None:
    def forward(x):
        return x

    before, after = (nn.Sequential(nn.Linear(5, 3)) for _ in range(2))
    before.forward = forward
    hooks = ModelHooks()
    for model in (before, after):
        hooks.show_to_compiler(model)
    after.forward = forward
    assert copy.deepcopy(after).forward is forward
    hooks.remove()
    assert before.forward is after.forward is forward


def _double(module, args):
    return (2 * args[0],)


class Net(nn.Module):
    """Of a class that is not torch's, which is compiled without the call around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, x):
        return self.layer(x)


def wrapped_then_compiled(model, wrap):
    wrap(model)
    return torch.compile(model, backend="eager", fullgraph=True)


def compiled_then_wrapped(model, wrap):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    wrap(model)
    return compiled


def compiled_in_place(model, wrap):
    wrap(model)
    model.compile(backend="eager", fullgraph=True)
    return model


def called_by_compiled_code(model, wrap):
    wrap(model)
    return torch.compile(lambda x: model(x), backend="eager", fullgraph=True)


def recomputed(model, wrap):
    wrap(model)
    return lambda x: checkpoint(model, x, use_reentrant=False)


def compiled_and_recomputed(model, wrap):
    compiled = wrapped_then_compiled(model, wrap)
    return lambda x: checkpoint(compiled, x, use_reentrant=False)


def recomputed_in_compiled_code(model, wrap):
    wrap(model)
    return torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="eager")


@pytest.mark.parametrize(
    "make",
    [
        wrapped_then_compiled,
        compiled_then_wrapped,
        compiled_in_place,
        called_by_compiled_code,
        recomputed,
        compiled_and_recomputed,
        recomputed_in_compiled_code,
    ],
)
@pytest.mark.parametrize("network", [mlp, Net])
@pytest.mark.parametrize("kind", ["samples", "blocks"])
def test_samples_are_counted_once(kind: str, network, make) -> None:
    """Whatever compiles the forward, and however often it is computed."""

    def rank_main(comm):
        model = network()
        optimizers = []
        call = make(model, lambda model: optimizers.append(wrap(comm, model, **KINDS[kind]())))
        (optimizer,) = optimizers
        for step in range(3):
            optimizer.zero_grad()
            call(batch(0, step, 4 + step)).sum().backward()
            assert optimizer.reducer.contribution.num_samples == 4 + step
            optimizer.step()

    run_ranks(rank_main, 1)
