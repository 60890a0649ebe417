"""Train an image classifier on one worker or many. Written by `torchmn init`: make it yours.

    torchmn run -n 2 train.py

`load_data` and `build_model` are what you will change first.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchmn

Batch = tuple[Tensor, Tensor]


def load_data(path: str | None) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test images, each (image, label): any `Dataset` with a length will do.

    Here: of a .npz file with ``images`` (count, channels, height, width) and ``labels`` (count),
    or artificial ones, four fifths of them for training.
    """
    if path is not None:
        with np.load(path) as file:
            images = torch.as_tensor(file["images"], dtype=torch.float32)
            labels = torch.as_tensor(file["labels"], dtype=torch.int64)
    else:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(10, (5000,), generator=generator)
        images = torch.randn(10, 1, 16, 16, generator=generator)[labels]
        images = images + torch.randn(images.shape, generator=generator)
    num_train = len(labels) * 4 // 5
    return (
        TensorDataset(images[:num_train], labels[:num_train]),
        TensorDataset(images[num_train:], labels[num_train:]),
    )


def build_model(train: TensorDataset) -> nn.Module:
    """Takes images (batch, channels, height, width), gives scores (batch, classes)."""
    images, labels = train.tensors
    return nn.Sequential(
        nn.Conv2d(images.shape[1], 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, int(labels.max()) + 1),
    )


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the batch."""
    return cross_entropy(outputs, targets)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", help=".npz file with images and labels; artificial ones without it")
    add("--epochs", type=int, default=5, help="passes over the training data")
    add("--batch", type=int, default=64, help="samples per step, of all workers together")
    add("--rate", type=float, default=1e-3, help="learning rate")
    add("--loaders", type=int, default=0, help="processes per worker that load data")
    add("--seed", type=int, default=0, help="of parameters, dropout and the order of samples")
    add("--checkpoints", default="checkpoints", help="folder that all workers see")
    add("--out", default="model.pt", help="file for the trained parameters")
    return parser.parse_args()


def evaluate(model: nn.Module, loader: DataLoader[Batch], comm: torchmn.Communicator) -> Tensor:
    """The mean loss and the accuracy, exact over the test samples of all workers."""
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for inputs, targets in loader:
            outputs, targets = model(inputs.to(comm.device)), targets.to(comm.device)
            right = (outputs.argmax(-1) == targets).sum()
            sums += torch.tensor([loss_of(outputs, targets) * targets.numel(), right, targets.numel()])
    sums = comm.allreduce(sums, "sum")
    return sums[:2] / sums[2]


def main() -> None:
    options = parse_options()
    comm = torchmn.create_communicator("auto")
    torchmn.seed_ranks(options.seed, comm)
    train, test = load_data(options.data)
    # One order for any number of workers, of which each takes its part of every batch.
    sampler = torchmn.GlobalSampler(len(train), comm, options.batch, options.seed, drop_last=True)
    loader = DataLoader(train, batch_sampler=sampler, num_workers=options.loaders)
    own_test = torchmn.scatter_dataset(test, comm, force_equal_length=False)
    test_loader: DataLoader[Batch] = DataLoader(own_test, 256)

    model = build_model(train).to(comm.device)
    adam = torch.optim.AdamW(model.parameters(), options.rate)
    optimizer = torchmn.create_multi_node_optimizer(adam, comm, model, weight="samples")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, options.epochs * len(sampler))

    # A second start continues from the last checkpoint, on any number of workers.
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
    checkpointer = torchmn.create_multi_node_checkpointer(comm, options.checkpoints, "training")
    step = checkpointer.resume(state)

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
        loss, accuracy = evaluate(model, test_loader, comm).tolist()
        if comm.rank == 0:
            print(f"epoch {epoch + 1}: test loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        checkpointer.save(step, state)
    checkpointer.finish()
    if comm.rank == 0:
        torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    torchmn.run_main(main)
