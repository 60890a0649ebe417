"""Train a classifier of rows of a table on one worker or many: torchmn run -n 2 train.py

Written by `torchmn init`. `load_data` and `build_model` are what you will change first.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import torchmn
from torchmn.errors import DataError


def load_data(path: str | None) -> list[Subset]:
    """Training and test rows, each (columns, class); any data sets with lengths will do."""
    if path is not None:  # one line of titles, then numbers; the last column is the class
        try:
            table = torch.tensor(np.loadtxt(path, np.float32, delimiter=",", skiprows=1, ndmin=2))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is no table of numbers below titles: {error}") from None
        rows, classes = table[:, :-1], table[:, -1].long()
        are_whole = (classes.clamp_min(0) == table[:, -1]).all()
        if not (rows.numel() and table.isfinite().all() and are_whole):
            raise DataError(f"{path} must have columns of numbers, last that of classes 0, 1, ...")
    else:  # artificial ones
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(5000, 20, generator=generator)
        classes = (rows @ torch.randn(20, 3, generator=generator)).argmax(1)
    rows = (rows - rows.mean(0)) / rows.std(0).clamp_min(1e-6)
    data = TensorDataset(rows, classes)
    return random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


def build_model(train: Subset) -> nn.Module:
    """From rows (batch, columns) to scores (batch, classes)."""
    rows, classes = train.dataset.tensors
    return nn.Sequential(
        nn.Linear(rows.shape[1], 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, int(classes.max()) + 1),
    )


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean over a batch."""
    return cross_entropy(scores, targets)


def evaluate(model: nn.Module, loader: DataLoader, comm: torchmn.Communicator) -> list[float]:
    """The mean loss and the accuracy, exact over the test samples of all workers."""
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for inputs, targets in loader:
            scores, targets = model(inputs.to(comm.device)), targets.to(comm.device)
            num, right = targets.numel(), (scores.argmax(-1) == targets).sum()
            sums += torch.tensor([num * loss_of(scores, targets), right, num])
    sums = comm.allreduce(sums, "sum")
    return (sums[:2] / sums[2]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", help=".csv file: titles, then numbers, the class last; artificial without it")
    add("--epochs", type=int, default=5, help="passes over the training data")
    add("--batch", type=int, default=64, help="samples per step, of all workers together")
    add("--rate", type=float, default=3e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of parameters, dropout and the order of samples")
    add("--checkpoints", default="checkpoints", help="folder that all workers see")
    options = parser.parse_args()

    comm = torchmn.create_communicator("auto")
    torchmn.seed_ranks(options.seed, comm)
    train, test = load_data(options.data)
    # One order for any number of workers; each takes its part of every batch.
    sampler = torchmn.GlobalSampler(len(train), comm, options.batch, options.seed, drop_last=True)
    loader = DataLoader(train, batch_sampler=sampler)
    test_loader = torchmn.scatter_loader(DataLoader(test, 256), comm)

    model = build_model(train).to(comm.device)
    adam = torch.optim.AdamW(model.parameters(), options.rate)
    optimizer = torchmn.create_multi_node_optimizer(adam, comm, model, weight="samples")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, options.epochs * len(sampler))

    # A second start continues from the last checkpoint, on any number of workers.
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
    checkpointer = torchmn.create_multi_node_checkpointer(comm, options.checkpoints, "train")
    step = checkpointer.resume(state)
    if step and comm.rank == 0:
        print(f"continuing after step {step}: {sampler.epoch} of {options.epochs} epochs are done")

    def save() -> None:
        checkpointer.save(step, state)
        checkpointer.finish()

    # Before the time limit of a job, and on SIGTERM, all workers save and exit with status 85.
    preemption = torchmn.Preemption(comm, save)
    for epoch in range(sampler.epoch, options.epochs):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs.to(comm.device)), targets.to(comm.device)).backward()
            optimizer.step()
            schedule.step()
            step += 1
            preemption.step_ended()
        loss, accuracy = evaluate(model, test_loader, comm)
        if comm.rank == 0:
            print(f"epoch {epoch + 1}: test loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        checkpointer.save(step, state)
    checkpointer.finish()
    if comm.rank == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    torchmn.run_main(main)
