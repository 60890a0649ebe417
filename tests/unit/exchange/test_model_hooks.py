"""Hooks on a model that no copy of it has."""

import copy

import torch
from torch import nn

from torchmn.exchange.model_hooks import ModelHooks


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
