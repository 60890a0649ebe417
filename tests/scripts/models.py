"""Small models and the plain loop over batches.

Ranks are threads that share one random generator, so models are built in turn.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from .worker import NUM_INPUTS, NUM_OUTPUTS, Worker

Built = TypeVar("Built")
Model = TypeVar("Model", bound=nn.Module)
_BUILDING = threading.Lock()


def built(make: Callable[[], Built], seed: int = 0) -> Built:
    """What ``make`` returns under this seed, whatever other threads do."""
    with _BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def layers(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Linear layers of these sizes with tanh between them."""

    def make() -> nn.Sequential:
        pairs = zip(sizes, sizes[1:], strict=False)
        stages = [stage for pair in pairs for stage in (nn.Linear(*pair), nn.Tanh())]
        return nn.Sequential(*stages[:-1])

    return built(make, seed)


def seeded(seed: int) -> torch.Generator:
    """A generator of a script's own."""
    return torch.Generator().manual_seed(seed)


def blobs(num: int, num_inputs: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes: ``(num, num_inputs)`` and labels ``(num,)``."""
    generator = seeded(seed)
    centers = 2 * torch.randn(3, num_inputs, generator=generator)
    y = torch.randint(3, (num,), generator=generator)
    return centers[y] + torch.randn(num, num_inputs, generator=generator), y


def mlp(seed: int = 0) -> nn.Sequential:
    """``(batch, 5) -> (batch, 3)``, three layers."""
    return built(
        lambda: nn.Sequential(
            nn.Linear(NUM_INPUTS, 8),
            nn.Tanh(),
            nn.Linear(8, 6),
            nn.Tanh(),
            nn.Linear(6, NUM_OUTPUTS),
        ),
        seed,
    )


def convolutions(seed: int = 0) -> nn.Sequential:
    """``(batch, 3, 6, 6) -> (batch, 3)``."""
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.Tanh(),
            nn.Conv2d(4, 4, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, NUM_OUTPUTS),
        ),
        seed,
    )


def mlp_and_sgd(
    worker: Worker, *, momentum: float = 0.0, **options: Any
) -> tuple[nn.Sequential, Any]:
    """A model and its optimizer, which exchanges gradients on ranks."""
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    return model, worker.optimizer(inner, model, **options)


def take_step(model: Callable[[Tensor], Tensor], optimizer: Any, x: Tensor, y: Tensor) -> None:
    """The step that most scripts take."""
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()


def steps(
    optimizer: Any, batches: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The loop of an ordinary script: what is done with a batch, between `zero_grad` and `step`."""
    for batch in batches:
        optimizer.zero_grad()
        yield batch
        optimizer.step()


def train(
    model: Callable[[Tensor], Tensor], optimizer: Any, batches: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """One step for each batch."""
    for x, y in batches:
        take_step(model, optimizer, x, y)


def closure_of(optimizer: Any, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What optimizers call that evaluate a batch as often as they need."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


def fit(
    worker: Worker,
    model: Model,
    inner: torch.optim.Optimizer | None = None,
    *,
    batches: Iterable[tuple[Tensor, Tensor]] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    **options: Any,
) -> Model:
    """The model after the plain loop: by default with SGD, mean squares, and whole batches."""
    inner = inner or torch.optim.SGD(model.parameters(), 0.1)
    optimizer = worker.optimizer(inner, model, **options)
    for x, y in steps(optimizer, worker.batches() if batches is None else batches):
        (loss(x, y) if loss else mse_loss(model(x), y)).backward()
    return model


def loader_of(worker: Worker, dataset: Any, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    """The user's loader, shuffled, and the line of torchmn."""
    loader = DataLoader(dataset, batch_size, shuffle=True, generator=seeded(1), **options)
    return worker.scatter_loader(loader)


def step_by(optimizer: Any, loss: Tensor) -> None:
    """The step of a loss that was computed before gradients are cleared."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
