"""Training begins at a forward pass in training mode of a model that is trained, and no other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.models import optimizer_of
from torchmn.comm.training_start import training_start
from torchmn.exchange.first_forward import watch_first_forward
from torchmn.testing import run_ranks

X = torch.ones(2, 3)


class Model(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x))


class Watched:
    """A model that is trained, and how often training has begun."""

    def __init__(self) -> None:
        self.model = Model(nn.Linear(3, 3), nn.Dropout(0.5))
        self.num_begun = 0
        self.wait()

    def wait(self) -> None:
        training_start.function = self.note
        watch_first_forward([self.model])

    def note(self) -> None:
        self.num_begun += 1

    def num_hooks(self) -> int:
        return sum(len(module._forward_pre_hooks) for module in self.model.modules())


@pytest.fixture
def watched() -> Iterator[Watched]:
    yield Watched()
    training_start.function = None


def test_once_at_the_first_training_pass(watched: Watched) -> None:
    assert watched.num_hooks() == 3
    for _ in range(2):
        watched.model(X)
        assert watched.num_begun == 1
        assert watched.num_hooks() == 0
    assert vars(watched.model).keys() == vars(nn.Sequential()).keys()


def test_nothing_is_hooked_where_nothing_waits(watched: Watched) -> None:
    training_start.function = None
    model = nn.Linear(3, 3)
    watch_first_forward([model])
    assert not model._forward_pre_hooks
    training_start.begin()


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_of_the_model_and_a_module_around_it(watched: Watched, part: int) -> None:
    watched.model[part](X)
    assert watched.num_begun == 1
    watched.wait()
    nn.Sequential(nn.Identity(), watched.model)(X)
    assert watched.num_begun == 2


def test_evaluations_and_other_models_do_not_begin_it(watched: Watched) -> None:
    with torch.no_grad():
        watched.model(X)
    with torch.inference_mode():
        watched.model(X)
    copy.deepcopy(watched.model)(X)
    pickle.loads(pickle.dumps(watched.model))[0](X)
    nn.Linear(3, 3)(X)
    watched.model.eval()(X)
    assert watched.num_begun == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_not_where_checkpointing_draws_numbers_twice(watched: Watched, use_reentrant: bool) -> None:
    x = X.clone().requires_grad_()
    checkpoint(watched.model, x, use_reentrant=use_reentrant).sum().backward()
    assert watched.num_begun == 0


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_within_transforms_of_functions(
    watched: Watched, transform: Callable[..., Callable[..., Any]]
) -> None:
    linear = watched.model[0]
    parameters = {name: p.detach().clone() for name, p in linear.named_parameters()}
    if transform is torch.vmap:
        parameters = {name: p[None] for name, p in parameters.items()}

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(linear, parameters, (X,)).sum()

    transform(loss)(parameters)
    assert watched.num_begun == 1


@pytest.mark.parametrize("form", ["given", "later", "in place", "function"])
@pytest.mark.filterwarnings("error")
def test_compiled_models(watched: Watched, form: str) -> None:
    model: Any = watched.model
    options: dict[str, Any] = {"backend": "eager", "fullgraph": True}
    if form == "in place":
        model.compile(**options)
    elif form == "function":
        model = torch.compile(lambda x: watched.model(x), **options)
    else:
        model = torch.compile(model, **options)
    if form == "given":
        watch_first_forward([model])
    model(X)
    num_begun = watched.num_begun
    assert bool(num_begun) == (form != "function")
    model(X)
    assert watched.num_begun == num_begun


def test_an_optimizer_sees_it_and_its_first_step_is_the_latest() -> None:
    def train(comm):  # type: ignore[no-untyped-def]
        begun: list[str] = []
        training_start.function = lambda: begun.append(step)
        model = nn.Linear(3, 1)
        optimizer = optimizer_of(comm, model)
        step = "step"
        (model.weight @ X.T).sum().backward()
        assert not begun
        optimizer.step()
        step = "forward"
        model(X)
        model(X)
        optimizer.close()
        step = "mean of gradients"
        comm.multi_node_mean_grad(model)
        return begun

    try:
        assert run_ranks(train, 1) == [["step", "forward", "mean of gradients"]]
    finally:
        training_start.function = None
