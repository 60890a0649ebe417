"""Ordinary combinations after `seed_ranks`, in one process without torchmn or as a rank of a job.

`combinations_script.py FOLDER [one]` writes what each combination has trained as a JSON file.
"""

import copy
import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, random_split

import torchmn

comm = None if "one" in sys.argv else torchmn.create_communicator(quiet=True)


def seed(number: int) -> None:
    """In place of `torch.manual_seed`."""
    if comm is not None:
        torchmn.seed_ranks(number, comm)
        return
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def scattered(loader: DataLoader) -> DataLoader:
    return loader if comm is None else torchmn.scatter_loader(loader, comm)


def wrapped(inner: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    return inner if comm is None else torchmn.create_multi_node_optimizer(inner, comm, model)


def parts() -> tuple[DataLoader, DataLoader]:
    """Batches of 7 samples of a random half, the last one of 3, and the other half."""
    x = torch.randn(76, 4, dtype=torch.float64)
    train, rest = random_split(TensorDataset(x, x.sin().sum(1, keepdim=True)), [38, 38])
    loader = DataLoader(train, 7, shuffle=True)
    return scattered(loader), scattered(DataLoader(rest, 7))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def clipped_with_average_and_schedule() -> list[nn.Module]:
    (loader, rest), model = parts(), network()
    optimizer = wrapped(torch.optim.AdamW(model.parameters(), 0.01), model)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    average = AveragedModel(model)  # a copy, before the first forward pass
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = squares(model, x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            rate.step()
            average.update_parameters(model)
        model.eval()
        with torch.no_grad():
            total = sum(float((model(x) - y).square().sum()) for x, y in rest)
        total = total if comm is None else comm.sum_over_ranks(total)
        assert total > 0
        model.train()
    return [model, average]


def compiled() -> list[nn.Module]:
    (loader, _), model = parts(), network()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    for x, y in loader:
        optimizer.zero_grad()
        squares(fast, x, y).backward()
        optimizer.step()
    return [model]


class Recomputed(nn.Module):
    """Its masks must be drawn again as they were, although training begins in this pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 64).double(), nn.Linear(64, 1).double()
        self.drop, self.masks = nn.Dropout(0.5), []

    def _part(self, x: Tensor) -> Tensor:
        kept = self.drop(torch.ones(64, dtype=x.dtype))
        self.masks.append(kept.detach().tolist())
        return self.first(x) + 0 * kept

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self._part, x, use_reentrant=False).tanh())


def recomputed() -> list[nn.Module]:
    (loader, _), model = parts(), Recomputed()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), 0.1), model)
    for x, y in loader:
        optimizer.zero_grad()
        squares(model, x, y).backward()
        optimizer.step()
    assert model.masks[::2] == model.masks[1::2], "masks were drawn anew in the backward pass"
    return [model]


def two_optimizers() -> list[nn.Module]:
    (loader, _), maker, critic = parts(), network(), network()
    critic[0] = nn.Linear(1, 8).double()
    steps = [wrapped(torch.optim.Adam(net.parameters(), 0.01), net) for net in (maker, critic)]
    for x, y in loader:
        steps[1].zero_grad()
        (critic(maker(x).detach()).mean() - critic(y).mean()).backward()
        nn.utils.clip_grad_value_(critic.parameters(), 0.1)
        steps[1].step()
        steps[0].zero_grad()
        (-critic(maker(x)).mean()).backward()
        steps[0].step()
    return [maker, critic]


def scaled_and_accumulated() -> list[nn.Module]:
    (loader, _), model = parts(), network()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), 0.05), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number, (x, y) in enumerate(loader):
        scaler.scale(squares(model, x, y) / 2).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [model]


def saved_whole_and_copied() -> list[nn.Module]:
    (loader, _), model = parts(), network()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), 0.1), model)
    teacher, file = copy.deepcopy(model), io.BytesIO()
    torch.save(model, file)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(x)
        loss = squares(model, x, y) + 0.1 * (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not loaded[0]._forward_pre_hooks
    return [model, loaded]


COMBINATIONS: tuple[Callable[[], list[nn.Module]], ...] = (
    clipped_with_average_and_schedule,
    compiled,
    recomputed,
    two_optimizers,
    scaled_and_accumulated,
    saved_whole_and_copied,
)


def main() -> None:
    found = {}
    for make in COMBINATIONS:
        seed(5)
        found[make.__name__] = [p.flatten().tolist() for net in make() for p in net.parameters()]
    name = "one" if comm is None else f"rank{comm.rank}"
    Path(sys.argv[1], f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
