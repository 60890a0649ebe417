"""Data loaders."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

from .models import mlp_and_sgd
from .registry import script
from .worker import Worker


def _train(
    worker: Worker, loader: DataLoader[tuple[Tensor, ...]], num_epochs: int = 2
) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for _ in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            worker.log("loss", worker.mean(loss))
    return model


def _samples(worker: Worker) -> Dataset[tuple[Tensor, ...]]:
    """This rank's part of each batch, one batch after another: 5 batches."""
    batches = list(worker.batches(5))
    return TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))


@script("`DataLoader` in the process itself")
def loader(worker: Worker) -> nn.Module:
    return _train(worker, DataLoader(_samples(worker), batch_size=8 // worker.size))


@script("`DataLoader` with a spawned worker", is_slow=True)
def loader_with_spawned_workers(worker: Worker) -> nn.Module:
    samples = _samples(worker)
    return _train(
        worker,
        DataLoader(
            samples,
            batch_size=8 // worker.size,
            num_workers=1,
            multiprocessing_context="spawn",
            persistent_workers=True,
        ),
    )
