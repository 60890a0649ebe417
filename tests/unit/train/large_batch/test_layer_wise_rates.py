"""LARS and LAMB against the formulas of their papers, and across ranks."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from torchmn.errors import UnsupportedError, UsageError
from torchmn.train.large_batch import LAMB, LARS

RATE, DECAY, TRUST, MOMENTUM, EPS = 0.3, 0.02, 0.01, 0.9, 1e-6
BETAS = (0.9, 0.99)
NUM_STEPS = 4
SHAPES = [(4, 3), (3,), (2, 3, 2, 2), ()]


def gradients(step: int) -> list[np.ndarray]:
    random = np.random.default_rng(step)
    return [random.standard_normal(shape) for shape in SHAPES]


def lars_of_the_paper(weights: list[np.ndarray]) -> list[np.ndarray]:
    """You et al. 2017, algorithm 1; scalars and vectors without local rate and decay."""
    velocities = [np.zeros_like(w) for w in weights]
    for step in range(NUM_STEPS):
        for i, g in enumerate(gradients(step)):
            w, local, decay = weights[i], 1.0, 0.0
            if w.ndim > 1:
                decay = DECAY
                local = TRUST * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
            velocities[i] = MOMENTUM * velocities[i] + RATE * local * (g + decay * w)
            weights[i] = w - velocities[i]
    return weights


def lamb_of_the_paper(weights: list[np.ndarray]) -> list[np.ndarray]:
    """You et al. 2019, algorithm 2; scalars and vectors without ratio and decay."""
    beta1, beta2 = BETAS
    m, v = ([np.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(NUM_STEPS):
        for i, g in enumerate(gradients(step)):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            r = (m[i] / (1 - beta1 ** (step + 1))) / (
                np.sqrt(v[i] / (1 - beta2 ** (step + 1))) + EPS
            )
            ratio = 1.0
            if weights[i].ndim > 1:
                r = r + DECAY * weights[i]
                ratio = np.linalg.norm(weights[i]) / np.linalg.norm(r)
            weights[i] = weights[i] - RATE * ratio * r
    return weights


def lars(params: Any, **options: Any) -> LARS:
    return LARS(params, RATE, MOMENTUM, DECAY, TRUST, **options)


def lamb(params: Any, **options: Any) -> LAMB:
    return LAMB(params, RATE, BETAS, EPS, DECAY, **options)


def first_weights() -> list[np.ndarray]:
    random = np.random.default_rng(99)
    return [random.standard_normal(shape) for shape in SHAPES]


@pytest.mark.parametrize(
    ("make", "formula"), [(lars, lars_of_the_paper), (lamb, lamb_of_the_paper)]
)
def test_as_in_the_paper(
    make: Callable[..., Optimizer],
    formula: Callable[[list[np.ndarray]], list[np.ndarray]],
) -> None:
    params = [nn.Parameter(torch.tensor(w)) for w in first_weights()]
    optimizer = make(params)
    for step in range(NUM_STEPS):
        for parameter, gradient in zip(params, gradients(step), strict=True):
            parameter.grad = torch.tensor(gradient)
        before = [gradient.copy() for gradient in gradients(step)]
        optimizer.step()
        for parameter, gradient in zip(params, before, strict=True):
            assert parameter.grad is not None
            assert np.array_equal(parameter.grad.numpy(), gradient)  # left as it was
    for parameter, weight in zip(params, formula(first_weights()), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-12)


@pytest.mark.parametrize("make", [lars, lamb])
def test_zero_weights_move_and_no_gradient_is_no_step(make: Callable[..., Optimizer]) -> None:
    zero, without = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = make([zero, without])
    zero.grad = torch.ones(2, 2)
    optimizer.step()
    assert (zero < 0).all()
    assert without.equal(torch.ones(2, 2))
    assert without not in optimizer.state


@pytest.mark.parametrize("make", [lars, lamb])
def test_vectors_can_be_included_by_group(make: Callable[..., Optimizer]) -> None:
    moved = []
    for exclude in (True, False):
        vector = nn.Parameter(torch.full((3,), 5.0))
        optimizer = make([{"params": [vector], "exclude_vectors": exclude}])
        vector.grad = torch.ones(3)
        optimizer.step()
        moved.append((5.0 - vector.detach()).norm().item())
    assert moved[0] == pytest.approx(RATE * 3**0.5)  # a step of SGD, or of Adam
    assert moved[1] != pytest.approx(moved[0])


@pytest.mark.parametrize("make", [lars, lamb])
def test_resumes_to_the_bit(make: Callable[..., Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())

    def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum().backward()
        optimizer.step()

    for seed in range(3):
        step(model, optimizer, seed)
    other = copy.deepcopy(model)
    resumed = make(other.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, resumed, seed)
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (LARS, {"lr": -0.1}),
        (LARS, {"lr": torch.tensor(-0.5)}),
        (LARS, {"momentum": 1.0}),
        (LARS, {"trust": float("nan")}),
        (LAMB, {"lr": -0.1}),
        (LAMB, {"betas": (0.9, 1.0)}),
        (LAMB, {"eps": -1.0}),
        (LAMB, {"weight_decay": -1.0}),
    ],
)
def test_wrong_options_of_a_group_are_refused(
    make: type[Optimizer], option: dict[str, object]
) -> None:
    first, second = ({"params": [nn.Parameter(torch.ones(2, 2))]} for _ in range(2))
    (name,) = option
    with pytest.raises(UsageError, match=f"^{name}="):
        make([dict(first), {**second, **option}])
    optimizer = make([first])
    with pytest.raises(UsageError, match=f"^{name}="):
        optimizer.add_param_group({**second, **option})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group(second)
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([second])


@pytest.mark.parametrize("make", [lars, lamb])
def test_sparse_gradients_are_refused(make: Callable[..., Optimizer]) -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        make(layer.parameters()).step()
