"""Hooks on a model that no copy of it has."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchmn.exchange.model_hooks import ModelHooks


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> None:
    """Torch stops to compile a function that other tests have compiled too often."""
    torch.compiler.reset()


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
