"""Small models that are the same on all ranks, which are threads that share one generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tests.contracts.suites.communicator_contracts import seeded
from torchmn import MultiNodeOptimizer, create_multi_node_optimizer
from torchmn.comm import Communicator


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Values that depend on the seed only."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(seeded(seed, *parameter.shape, salt=i) / 20)
    return model


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    return fill(model, seed)  # type: ignore[return-value]


class OfObject(nn.Module):
    """Takes an object whose number of samples cannot be seen from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, inputs: SimpleNamespace) -> Tensor:
        return self.layer(inputs.x)


def batch(rank: int, step: int, size: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return (seeded(rank, size, 5, salt=100 + step) / 10).to(dtype)


def loss_of(model: nn.Module, x: Tensor | SimpleNamespace) -> Tensor:
    """The mean over samples, not linear in the parameters."""
    return model(x).pow(2).mean()


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=momentum)


def optimizer_of(
    comm: Communicator, model: nn.Module, lr: float = 0.1, momentum: float = 0.9, **options: object
) -> MultiNodeOptimizer:
    """A multi-node optimizer over SGD."""
    inner = sgd(model, lr, momentum)
    return create_multi_node_optimizer(inner, comm, model, **options)  # type: ignore[arg-type]


def wrap(
    comm: Communicator,
    make_inner: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **options: object,
) -> tuple[nn.Sequential, MultiNodeOptimizer]:
    """A small model and the multi-node optimizer that trains it."""
    model = mlp()
    return model, create_multi_node_optimizer(make_inner(model), comm, model, **options)  # type: ignore[arg-type]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: Iterable[int],
    size: int = 4,
) -> None:
    """Steps as users write them."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(rank, step, size)).backward()
        optimizer.step()


def closure_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor
) -> Callable[[], Tensor]:
    """For optimizers that compute the loss as often as they like, such as LBFGS."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        return loss

    return closure


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def local_grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What one process alone would get, without touching ``p.grad``."""
    return list(torch.autograd.grad(loss_of(model, x), list(model.parameters())))


def mean_grads(model: nn.Module, ranks: Iterable[int], step: int = 0) -> list[Tensor]:
    """The mean of what `local_grads` gives for each of the ranks."""
    parts = [local_grads(model, batch(rank, step)) for rank in ranks]
    return [sum(column) / len(parts) for column in zip(*parts, strict=True)]  # type: ignore[misc]


def set_grads(model: nn.Module, gradients: Iterable[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit by bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def near(a: list[Tensor], b: list[Tensor], tolerance: float = 1e-12) -> bool:
    return len(a) == len(b) and all(
        torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a, b, strict=True)
    )
