"""Data sets and their samples."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from .models import mlp_and_sgd, take_step
from .registry import refused, script
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
    return refused("as many samples as that of rank 0, but different ones", cure=cure)


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


@script("The batch size grows between epochs, `loader.batch_sampler.batch_size = ...`")
def growing_batch_size(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    loader = worker.scatter_loader(DataLoader(_data(), 4, shuffle=True, generator=generator))
    for batch_size in (4, 6, 9):
        loader.batch_sampler.batch_size = batch_size
        loader.batch_sampler.drop_last = batch_size == 9
        worker.log("steps", len(loader))
        for x, y in loader:
            take_step(model, optimizer, x, y)
    return model


@script("The loader is made again for each stage, with other options")
def loader_made_again(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for batch_size, drop_last in ((4, False), (6, True), (9, False)):
        loader = DataLoader(_data(), batch_size, drop_last=drop_last)
        for x, y in worker.scatter_loader(loader):
            take_step(model, optimizer, x, y)
    return model


@script("A running average of the loss, of batches that have samples on this rank")
def running_average(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for _ in range(2):
        loss_sum, num = 0.0, 0
        for x, y in worker.scatter_loader(DataLoader(_data(), 4)):  # the last batch has 1 sample
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if len(x):
                loss_sum += loss.item() * len(x)
                num += len(x)
        worker.flush(optimizer)
        loss_sum, num = worker.sum_over_ranks(loss_sum, num)
        worker.log("loss", loss_sum / num)
    return model


@script("Predictions for all samples in the order of the data set, `gather_outputs`")
def predictions(worker: Worker) -> list[Any]:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for x, y in worker.scatter_loader(DataLoader(_data(), 6)):
        take_step(model, optimizer, x, y)
    worker.flush(optimizer)
    test = worker.scatter_loader(DataLoader(_data(), 4))
    with torch.no_grad():
        outputs = [model(x) for x, _ in test]
    return [model, worker.gather_outputs(test, outputs)]


class _Indexed(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples with their index."""

    def __init__(self) -> None:
        self.x, self.y = whole_batch(0, NUM)

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


@script("A memory of each sample's last output, `gather_by_index`")
def memory_of_samples(worker: Worker) -> list[Any]:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(_Indexed(), 4, shuffle=True, generator=generator)
    loader, memory = worker.scatter_loader(loader), torch.zeros(NUM, 3, dtype=torch.float64)
    for _ in range(3):
        for index, x, y in loader:
            optimizer.zero_grad()
            output = model(x)
            (mse_loss(output, y) + 0.1 * mse_loss(output, memory[index])).backward()
            optimizer.step()
            seen, outputs = worker.gather_by_index(index, output)
            memory[seen] = outputs
    return [model, memory]


@script("Pseudo-labels that an epoch writes into the data, `gather_by_index`")
def pseudo_labels(worker: Worker) -> list[Any]:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    data = _Indexed()
    generator = torch.Generator().manual_seed(7)
    loader = worker.scatter_loader(DataLoader(data, 4, shuffle=True, generator=generator))
    for _ in range(3):
        for _, x, y in loader:
            take_step(model, optimizer, x, y)
        worker.flush(optimizer)
        indices, labels = [], []
        with torch.no_grad():
            for index, x, y in loader:
                indices.append(index)
                labels.append(0.5 * y + 0.5 * model(x))
        nothing = torch.zeros(0, 3, dtype=torch.float64)
        seen, new = worker.gather_by_index(
            torch.cat([torch.zeros(0, dtype=torch.int64), *indices]), torch.cat([nothing, *labels])
        )
        data.y[seen] = new
    return [model, data.y]
