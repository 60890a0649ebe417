"""Models whose parameters are replaced, added and unfrozen while their optimizer is open."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from .models import blobs, layers, loader_of, seeded, steps
from .registry import script
from .worker import Worker


def _train(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in steps(optimizer, loader):
        F.cross_entropy(model(x), y).backward()


class _Scene(nn.Module):
    """A curve as a sum of Gaussians."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.linspace(0, 1, 5))
        self.width = nn.Parameter(torch.full((5,), -2.0))
        self.height = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        distances = (x[:, None] - self.place) / self.width.exp()
        return (self.height * (-distances.square()).exp()).sum(1)


def _replace(scene: nn.Module, optimizer: Any, new: Callable[[Tensor], Tensor]) -> None:
    """Put other parameters into the groups, with their part of the optimizer's state."""
    for group in optimizer.param_groups:
        (old,) = group["params"]
        state = optimizer.state.pop(old, {})
        parameter = nn.Parameter(new(old.detach()))
        for name in {"exp_avg", "exp_avg_sq"} & set(state):
            state[name] = new(state[name])
        if state:
            optimizer.state[parameter] = state
        group["params"][0] = parameter
        setattr(scene, group["name"], parameter)


@script(
    "Gaussian splatting: parameters replaced in their groups by more and by fewer, with their state"
)
def splatting(worker: Worker) -> nn.Module:
    x = torch.rand(48, generator=seeded(2))
    scene = _Scene()
    groups = [{"params": [p], "name": name} for name, p in scene.named_parameters()]
    optimizer = worker.optimizer(torch.optim.Adam(groups, 0.02), scene)
    slopes, loader = torch.zeros(5), loader_of(worker, TensorDataset(x, (12 * x).sin()))
    for number, (own, wanted) in enumerate([*loader, *loader, *loader]):
        F.mse_loss(scene(own), wanted).backward()
        slopes += scene.place.grad.abs()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number in (4, 9):
            rows = torch.cat(
                [torch.arange(len(slopes)), (slopes > slopes.median()).nonzero()[:, 0]]
            )
            _replace(scene, optimizer, lambda old, rows=rows: old[rows])
        elif number == 13:
            _replace(scene, optimizer, lambda old: old[1:].clone())
        slopes = slopes if slopes.shape == scene.place.shape else torch.zeros_like(scene.place.data)
    return scene


@script("Parameters replaced between `backward()` and `step()`, which then leaves them out")
def replaced_before_step(worker: Worker) -> nn.Module:
    scene, x = _Scene(), torch.rand(40, generator=seeded(2))
    groups = [{"params": [p], "name": name} for name, p in scene.named_parameters()]
    optimizer = worker.optimizer(torch.optim.Adam(groups, 0.02), scene)
    for number, (own, wanted) in enumerate(loader_of(worker, TensorDataset(x, (12 * x).sin()))):
        F.mse_loss(scene(own), wanted).backward()
        if number == 2:
            _replace(scene, optimizer, lambda old: torch.cat([old, old]))
        optimizer.step()
        optimizer.zero_grad()
    return scene


@script("A new layer's parameters are appended to a group by hand")
def appended(worker: Worker) -> nn.Module:
    (x, y), model = blobs(40), layers(6, 8, 3)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    loader = loader_of(worker, TensorDataset(x, y))
    _train(model, optimizer, loader)
    new = layers(8, 8, seed=worker.rank)  # drawn: another one on each rank
    model.insert(2, new)
    optimizer.param_groups[0]["params"].extend(new.parameters())
    _train(model, optimizer, loader)
    return model


@script("Two phases: a new head with an optimizer, then the body, unfrozen, by `add_param_group`")
def unfrozen_later(worker: Worker) -> nn.Module:
    (x, y), model = blobs(40), layers(6, 8, 5)
    loader = loader_of(worker, TensorDataset(x, y))
    _train(model, worker.optimizer(torch.optim.Adam(model.parameters(), 1e-2), model), loader)
    model[2] = layers(8, 3)
    model[0].requires_grad_(False)
    optimizer = worker.optimizer(torch.optim.Adam(model[2].parameters(), 1e-2), model)
    _train(model, optimizer, loader)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
    _train(model, optimizer, loader)
    return model


@script("Layer by layer: an autoencoder for each, on codes of the one before, then all of them")
def layer_by_layer(worker: Worker) -> nn.Module:
    x, y = blobs(37)
    codes, trained = x, []
    for sizes in ((6, 5), (5, 4)):
        coder, decoder = layers(*sizes), layers(*sizes[::-1])
        both = nn.Sequential(coder, nn.Tanh(), decoder)
        optimizer = worker.optimizer(torch.optim.Adam(both.parameters(), 1e-2), both)
        for (own,) in steps(optimizer, loader_of(worker, TensorDataset(codes))):
            F.mse_loss(both(own), own).backward()
        trained += [coder, nn.Tanh()]
        with torch.no_grad():
            codes = both[:2](codes)
    model = nn.Sequential(*trained, layers(4, 3))
    optimizer = worker.optimizer(torch.optim.Adam(model[4].parameters(), 1e-2), model)
    optimizer.add_param_group({"params": model[:4].parameters(), "lr": 1e-3})
    _train(model, optimizer, loader_of(worker, TensorDataset(x, y)))
    return model


@script("A head for more classes replaces the old one, which stays in its group")
def more_classes(worker: Worker) -> nn.Module:
    (x, y), model = blobs(40), layers(6, 8, 2)
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 1e-2), model)
    _train(model, optimizer, loader_of(worker, TensorDataset(x[y < 2], y[y < 2])))
    old, model[2] = model[2], layers(8, 3)
    with torch.no_grad():
        model[2][0].weight[:2] = old.weight
    optimizer.add_param_group({"params": model[2].parameters()})
    _train(model, optimizer, loader_of(worker, TensorDataset(x, y)))
    return model
