"""Data sets, which all ranks must have alike."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from .models import mlp_and_sgd, take_step
from .registry import Refused, everywhere, script
from .worker import Worker, whole_batch

NUM = 21


def _data() -> TensorDataset:
    return TensorDataset(*whole_batch(0, NUM))


def _train(worker: Worker, data: Dataset[Any]) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    loader = DataLoader(data, 6, shuffle=True, generator=torch.Generator().manual_seed(7))
    loader = worker.scatter_loader(loader)
    for _ in range(2):
        for x, y in loader:
            take_step(model, optimizer, x, y)
    return model


class _Folder(Dataset[tuple[Tensor, Tensor]]):
    """One file for each sample."""

    def __init__(self, files: list[str]) -> None:
        self.files = files
        self._contents = dict(zip(map(str, range(NUM)), _data(), strict=True))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self._contents[self.files[index].split("/")[-1]]
        return x, y


def _listing(worker: Worker) -> list[str]:
    """A directory of this rank's host, in an order of its own."""
    files = [f"/scratch/host{worker.rank}/train/{number}" for number in range(NUM)]
    random.Random(worker.rank).shuffle(files)
    return files


def _other(cure: str) -> dict[str, Any]:
    return everywhere(Refused("as many samples as that of rank 0, but others", cure=cure))


@script("Files in the order of a directory", **_other("`sorted(os.listdir(...))`"))
def order_of_directory(worker: Worker) -> nn.Module:
    return _train(worker, _Folder(_listing(worker)))


@script("Files of each host's own copy, sorted, in another folder on each")
def copies_of_hosts(worker: Worker) -> nn.Module:
    def number(file: str) -> int:
        return int(file.split("/")[-1])

    return _train(worker, _Folder(sorted(_listing(worker), key=number)))


@script(
    "`random_split` with another seed on each rank",
    **_other("`seed_ranks` before it, or `generator=`"),
)
def split_by_own_seed(worker: Worker) -> nn.Module:
    generator = torch.Generator().manual_seed(worker.rank)
    return _train(worker, random_split(_data(), [15, 6], generator)[0])


@script("Each rank passes its part of the data", **_other("pass all of it; it is divided"))
def own_part(worker: Worker) -> nn.Module:
    part = torch.arange(20).tensor_split(worker.size)[worker.rank].tolist()
    return _train(worker, torch.utils.data.Subset(_data(), part))


class _Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws on each rank from numbers of its own, which are zero here, and has no attributes."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = _data()[index]
        return x + 0 * torch.rand(()) * random.random(), y


@script("Samples that are computed, with random augmentation")
def computed_samples(worker: Worker) -> nn.Module:
    return _train(worker, _Noisy())
