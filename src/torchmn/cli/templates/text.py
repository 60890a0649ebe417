"""Train a language model on one worker or many: torchmn run -n 2 train.py

Written by `torchmn init`. `load_data` and `build_model` are what you will change first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import torchmn
from torchmn.errors import DataError

LENGTH = 64  # bytes that the model sees at once


def load_data(path: str | None) -> list[Subset]:
    """Training and test pieces, each (bytes, bytes that follow); any data sets will do."""
    file = Path(path or argparse.__file__)
    if not file.is_file() or file.stat().st_size <= LENGTH:
        raise DataError(f"{path} must be a file of text, of more than {LENGTH} bytes")
    text = bytearray(file.read_bytes())
    numbers, end = torch.frombuffer(text, dtype=torch.uint8).long(), len(text) - 1
    end -= end % LENGTH
    pieces, followers = numbers[:end].view(-1, LENGTH), numbers[1 : end + 1].view(-1, LENGTH)
    data = TensorDataset(pieces, followers)
    return random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


class LanguageModel(nn.Module):
    """From bytes (batch, length) to scores of the next ones (batch, length, 256)."""

    def __init__(self, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device)
        hidden = self.bytes(text) + self.positions
        return self.scores(self.layers(hidden, mask=mask, is_causal=True))


def build_model(train: Subset) -> nn.Module:
    """The model for pieces like these."""
    return LanguageModel()


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean over a batch."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


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
    add("--data", help="text file; the source of a module of Python without it")
    add("--epochs", type=int, default=5, help="passes over the training data")
    add("--batch", type=int, default=64, help="samples per step, of all workers together")
    add("--rate", type=float, default=1e-3, help="learning rate")
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
