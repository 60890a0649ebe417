"""Train an image classifier on one worker or many: torchmn run -n 2 train.py

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

DATA_HELP = ".npz file with images and classes (default: artificial images)"
RATE = 1e-3


def load_data(path: str | None) -> list[Subset]:
    """Training and test images, each (image, class); any data sets with lengths will do."""
    if path is not None:
        try:
            file = np.load(path)
            images, classes = torch.tensor(file["images"]).float(), torch.tensor(file["classes"])
        except Exception:
            raise DataError(f"{path} is no .npz file with arrays images and classes") from None
        are_whole = len(images) and (classes.long().clamp_min(0) == classes).all()
        if images.ndim != 4 or classes.shape != images.shape[:1] or not are_whole:
            raise DataError(
                f"{path} has images {[*images.shape]} and classes {[*classes.shape]}: needed are "
                "[count, channels, height, width], and [count] whole numbers 0, 1, ..."
            )
    else:  # artificial ones
        generator = torch.Generator().manual_seed(0)
        classes = torch.randint(10, (5000,), generator=generator)
        images = torch.randn(10, 1, 16, 16, generator=generator)[classes]
        images = images + torch.randn(images.shape, generator=generator)
    data = TensorDataset(images, classes.long())
    return random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


def build_model(train: Subset) -> nn.Module:
    """A model from images (batch, channels, height, width) to scores (batch, classes)."""
    images, classes = train.dataset.tensors
    return nn.Sequential(
        nn.Conv2d(images.shape[1], 16, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, int(classes.max()) + 1),
    )


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over a batch."""
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
    add("--data", help=DATA_HELP)
    add("--epochs", type=int, default=5, help="passes over the training data")
    add("--batch", type=int, default=64, help="samples per step, of all workers together")
    add("--rate", type=float, default=RATE, help="learning rate")
    add("--seed", type=int, default=0, help="seed of parameters, dropout and the order of samples")
    add("--checkpoints", default="checkpoints", help="folder that all workers see")
    options = parser.parse_args()

    comm = torchmn.create_communicator()
    torchmn.seed_ranks(options.seed, comm)
    train, test = load_data(options.data)
    # One order for any number of workers; each takes its part of every batch.
    sampler = torchmn.GlobalSampler(train, comm, options.batch, options.seed, drop_last=True)
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
