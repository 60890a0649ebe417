"""Train a language model on bytes on one worker or many. Written by `torchmn init`: make it yours.

    torchmn run -n 2 train.py

`load_data` and `build_model` are what you will change first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchmn

Batch = tuple[Tensor, Tensor]
LENGTH = 64  # bytes that the model sees at once


def load_data(path: str | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test text, each (bytes, the bytes that follow): any `Dataset` will do.

    Here: pieces of a file, four fifths of them for training; without one of a module of Python.
    """
    text = Path(path or argparse.__file__).read_bytes()
    num_pieces = (len(text) - 1) // LENGTH
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    pieces = numbers[: num_pieces * LENGTH].view(-1, LENGTH)
    labels = numbers[1 : num_pieces * LENGTH + 1].view(-1, LENGTH)
    num_train = len(labels) * 4 // 5
    return (
        TensorDataset(pieces[:num_train], labels[:num_train]),
        TensorDataset(pieces[num_train:], labels[num_train:]),
    )


class LanguageModel(nn.Module):
    """Takes bytes (batch, length), gives scores of the next ones (batch, length, 256)."""

    def __init__(self, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        hidden = self.bytes(text) + self.positions(torch.arange(length, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        scores: Tensor = self.scores(self.layers(hidden, mask=mask, is_causal=True))
        return scores


def build_model(train: TensorDataset) -> nn.Module:
    """The model, with parameters of its own."""
    return LanguageModel()


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the bytes of the batch."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", help="text file; a module of Python without it")
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
