"""What `bench_report.py` trains on test hosts: a perceptron, with more work on one rank.

    report_training.py [--rank R] [--forward X] [--backward X] [--data X]

X is how much longer the rank takes there, as a share of what a whole step computes.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchmn

NUM_STEPS, BATCH, WIDTH = 80, 64, 700


class Repeat(torch.autograd.Function):
    """Identity, which computes in forward or backward for a while."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, there_s: float, back_s: float
    ) -> torch.Tensor:
        ctx.back_s = back_s
        compute(there_s)
        return x.view_as(x)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        compute(ctx.back_s)
        return gradient, None, None


class Samples(Dataset):
    """Random ones, each of which takes some time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return NUM_STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return torch.randn(WIDTH)


class Model(nn.Module):
    def __init__(self, there_s: float, back_s: float) -> None:
        super().__init__()
        self.there_s, self.back_s = there_s, back_s
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        self.first = nn.Sequential(*layers[:4])
        self.last = nn.Sequential(*layers[4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Repeat.apply(self.first(x), self.there_s, self.back_s))


def compute(seconds: float) -> None:
    """Keep the core busy for so much of its time, however much of the core there is."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=-1)
    for name in ("--forward", "--backward", "--data"):
        parser.add_argument(name, type=float, default=0.0)
    options = parser.parse_args()
    comm = torchmn.create_communicator()
    torch.manual_seed(0)
    unit_s = torch.tensor([_seconds_of_a_step()])
    unit = float(comm.allreduce(unit_s)) / comm.size * (comm.rank == options.rank)
    model = Model(options.forward * unit, options.backward * unit)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.01), comm, model
    )
    for batch in DataLoader(Samples(options.data * unit / BATCH), batch_size=BATCH):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def _seconds_of_a_step() -> float:
    model = Model(0.0, 0.0)
    batch = torch.randn(BATCH, WIDTH)
    for count in range(6):
        if count == 1:
            began = time.thread_time()
        model(batch).square().mean().backward()
    return (time.thread_time() - began) / 5


if __name__ == "__main__":
    main()
