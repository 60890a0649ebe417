"""Train a perceptron on MNIST with data and model parallelism at once.

    torchmn run -n 4 examples/model_parallel/train_mnist_dual.py --download --data-root data

Two workers have the two parts of the network, and there are as many such pairs as workers allow.
Every pair trains on its part of each batch; the gradients of a part are averaged over the workers
that have the same part. --model-workers 1 is plain data parallelism.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
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
        description="Train a perceptron on MNIST with data and model parallelism at once.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epoch", type=int, default=5, help="number of epochs")
    add("--batchsize", type=int, default=100, help="images per step, of all workers together")
    add("--learnrate", type=float, default=0.1, help="learning rate")
    add("--units", type=int, default=1000, help="units of a hidden layer")
    add("--model-workers", type=int, default=2, help="workers that share one network, 1 to 3")
    add("--dataset", default="mnist", choices=["mnist", "digits"], help="images")
    add("--data-root", help="folder or file that has them")
    add("--download", action="store_true", help="download them if they are missing")
    add("--seed", type=int, default=0, help="seed of parameters and the order of images")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    comm = torchmn.create_communicator()
    if options.model_workers not in (1, 2, 3):
        raise UsageError(
            f"--model-workers {options.model_workers}: the network has 3 layers. Give 1, 2 or 3."
        )
    # along "model" workers share a network; along "data" they average gradients of the same part
    grid = torchmn.Grid(comm, data=-1, model=options.model_workers)
    model_comm, data_comm = grid.model, grid.data
    images = load_images(
        options.dataset, options.data_root, download=options.download, comm=comm
    ).normalised()
    num_inputs = images.shape[-1] ** 2
    part = mlp_part(
        model_comm.rank,
        model_comm.size,
        num_inputs=num_inputs,
        num_units=options.units,
        seed=options.seed,
    ).to(comm.device)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(part.parameters(), options.learnrate, momentum=0.9),
        data_comm,
        part,
        weight="samples",
    )
    sampler = torchmn.GlobalSampler(images.train, data_comm, options.batchsize, options.seed)
    train = DataLoader(images.train, batch_sampler=sampler)
    is_last = model_comm.rank == model_comm.size - 1

    for epoch in range(options.epoch):
        total = torch.zeros(2, dtype=torch.float64)
        for x, labels in train:
            if model_comm.rank > 0:
                x = F.recv(model_comm, model_comm.rank - 1)
            y = part(x.to(comm.device))
            optimizer.zero_grad()
            if is_last:
                loss = cross_entropy(y, labels.to(comm.device))
                loss.backward()
                total += torch.tensor([float(loss.detach()) * len(labels), len(labels)])
            else:
                F.send(y, model_comm, model_comm.rank + 1).backward()
            optimizer.step()
        loss_sum, num_images = comm.allreduce(total).tolist()
        if comm.rank == 0:
            print(f"epoch {epoch + 1}: loss {loss_sum / num_images:.6f}", flush=True)


if __name__ == "__main__":
    torchmn.run_main(main)
