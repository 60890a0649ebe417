"""Train a perceptron on MNIST whose layers are divided among two or three workers.

    torchmn run -n 2 examples/model_parallel/train_mnist_split.py --download --data-root data

All workers read the same batches. The first one sends its activations to the next and so on; the
last one has the loss. Backward sends the gradients the other way. The parameters are those of one
worker (-n 1), bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import torchmn
import torchmn.functions as F
from torchmn.errors import UsageError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import load_images
from models import mlp_part


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a perceptron on MNIST whose layers are divided among workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epoch", type=int, default=5, help="number of epochs")
    add("--batchsize", type=int, default=100, help="images per step")
    add("--learnrate", type=float, default=0.1, help="learning rate")
    add("--units", type=int, default=1000, help="units of a hidden layer")
    add("--dataset", default="mnist", choices=["mnist", "digits"], help="images")
    add("--data-root", help="folder or file that has them")
    add("--download", action="store_true", help="download them if they are missing")
    add("--seed", type=int, default=0, help="seed of parameters and the order of images")
    return parser.parse_args()


class SplitModel(nn.Module):
    """This rank's layers, with the ranks before and after."""

    def __init__(self, layers: nn.Module, comm: torchmn.Communicator) -> None:
        super().__init__()
        self.layers, self.comm = layers, comm

    @property
    def is_last(self) -> bool:
        """Whether this rank has the logits."""
        return self.comm.rank == self.comm.size - 1

    def forward(self, images: Tensor) -> Tensor:
        """Logits on the last rank; elsewhere a delegate, whose backward brings the gradients."""
        comm = self.comm
        x = images if comm.rank == 0 else F.recv(comm, comm.rank - 1)
        y = self.layers(x)
        return y if self.is_last else F.send(y, comm, comm.rank + 1)


def main() -> None:
    options = parse_options()
    comm = torchmn.create_communicator()
    if comm.size > 3:
        raise UsageError(f"The network has 3 layers, but there are {comm.size} workers. Use -n 3.")
    images = load_images(
        options.dataset, options.data_root, download=options.download, comm=comm
    ).normalised()
    num_inputs = images.shape[-1] ** 2
    layers = mlp_part(
        comm.rank, comm.size, num_inputs=num_inputs, num_units=options.units, seed=options.seed
    )
    model = SplitModel(layers, comm).to(comm.device)
    optimizer = torch.optim.SGD(model.parameters(), options.learnrate, momentum=0.9)
    order = torch.Generator().manual_seed(options.seed)  # the same on all ranks
    train = DataLoader(images.train, options.batchsize, shuffle=True, generator=order)
    test = DataLoader(images.test, options.batchsize)

    for epoch in range(options.epoch):
        total = 0.0
        for x, labels in train:
            result = model(x.to(comm.device))
            loss = cross_entropy(result, labels.to(comm.device)) if model.is_last else result
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(labels)
        num_correct = 0
        with torch.no_grad():
            for x, labels in test:
                result = model(x.to(comm.device))
                if model.is_last:
                    num_correct += int((result.argmax(1).cpu() == labels).sum())
        if model.is_last:
            loss_text = f"loss {total / len(images.train):.6f}"
            accuracy = num_correct / len(images.test)
            print(f"epoch {epoch + 1}: {loss_text}, test accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    torchmn.run_main(main)
