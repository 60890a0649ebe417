"""Train a convolutional network whose channels are divided among the workers.

    torchmn run -n 2 examples/model_parallel/train_mnist_parallel_convolution.py --download

Every worker sees the same images and computes some channels of each convolution; they are gathered
after each layer (ChainerMN's parallel convolution). The losses are those of one worker, so a plain
optimizer is enough. It pays where activations are small and layers large; see
docs/explain/model-parallelism.md.
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
from torchmn.nn import ParallelConv2d, ParallelLinear, gather_state_dict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import load_images


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a network whose channels are divided among the workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epoch", type=int, default=2, help="number of epochs")
    add("--steps", type=int, help="end after this number of steps")
    add("--batchsize", type=int, default=64, help="images per step")
    add("--learnrate", type=float, default=0.05, help="learning rate")
    add("--dataset", default="mnist", choices=["mnist", "digits"], help="images")
    add("--data-root", help="folder or file that has them")
    add("--download", action="store_true", help="download them if they are missing")
    add("--seed", type=int, default=0, help="seed of parameters and the order of images")
    add("--out", help="file for the whole model's state, which one process can load")
    return parser.parse_args()


def network(comm: torchmn.Communicator, side: int) -> nn.Sequential:
    """Images ``(batch, 1, side, side)`` to logits ``(batch, 10)``."""
    return nn.Sequential(
        ParallelConv2d(1, 17, 3, comm, padding=1),  # not a multiple of the workers: that is fine
        nn.ReLU(),
        nn.MaxPool2d(2),
        ParallelConv2d(17, 32, 3, comm, padding=1, split="input"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        ParallelLinear(32 * (side // 4) ** 2, 128, comm),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def accuracy(model: nn.Module, comm: torchmn.Communicator, images: DataLoader[Tensor]) -> float:
    """The accuracy on the test images, which all workers read."""
    num_right = num_seen = 0
    with torch.no_grad():
        for x, labels in images:
            predicted = model(x.to(comm.device)).argmax(1).cpu()
            num_right += int((predicted == labels).sum())
            num_seen += len(labels)
    return num_right / num_seen


def main() -> None:
    options = parse_options()
    comm = torchmn.create_communicator()
    images = load_images(
        options.dataset, options.data_root, download=options.download, comm=comm
    ).normalised()
    torch.manual_seed(options.seed)  # the same on all workers
    model = network(comm, images.shape[-1]).to(comm.device)
    optimizer = torch.optim.SGD(model.parameters(), options.learnrate, momentum=0.9)
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(images.train, options.batchsize, shuffle=True, generator=order)
    batches = torchmn.create_multi_node_iterator(loader if comm.rank == 0 else None, comm)
    step = 0
    for epoch in range(options.epoch):
        for x, labels in batches:
            if step == options.steps:
                break
            optimizer.zero_grad()
            loss = cross_entropy(model(x.to(comm.device)), labels.to(comm.device))
            loss.backward()
            optimizer.step()
            step += 1
            if comm.rank == 0 and (step <= 10 or step % 100 == 0):
                print(f"step {step}  loss {loss.item():.6f}", flush=True)
        reached = accuracy(model, comm, DataLoader(images.test, 256))
        if comm.rank == 0:
            print(f"epoch {epoch + 1}  accuracy {reached:.4f}", flush=True)
    state = gather_state_dict(model)
    if comm.rank == 0 and options.out:
        torch.save(state, options.out)


if __name__ == "__main__":
    torchmn.run_main(main)
