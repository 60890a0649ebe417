"""A training script in one process or as ranks: what `bench_own_script.py` starts.

    RANK=... WORLD_SIZE=... own_script.py MODEL THREADS

Every line that it reads is a number of steps on a global batch of the size of `BATCHES`, of which
each rank has its part. For each it prints a line of JSON: the seconds of the steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models.mlp import MLP
from models.small_cnn import SmallCNN
from models.vgg import VGG


class LSTM(nn.Module):
    """A language model of two layers: ``(batch, 35)`` tokens to ``(batch, 10)``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 200)
        self.rnn = nn.LSTM(200, 200, 2, batch_first=True)
        self.out = nn.Linear(200, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.embedding(tokens))[0][:, -1])


BATCHES = {"VGG": 64, "convolutions": 64, "MLP": 128, "LSTM": 32}


def main() -> None:
    name, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model: nn.Module = {"VGG": lambda: VGG(10), "convolutions": lambda: SmallCNN(10, 3, 32),
                        "MLP": MLP, "LSTM": LSTM}[name]()  # fmt: skip
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    size = int(os.environ["WORLD_SIZE"])
    barrier = lambda: None  # noqa: E731
    if size > 1:
        import torchmn

        comm = torchmn.create_communicator("auto")
        torchmn.seed_ranks(0, comm)
        optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model)
        barrier = comm.barrier
    batch = BATCHES[name] // size
    inputs = {
        "VGG": lambda: torch.rand(batch, 3, 32, 32),
        "convolutions": lambda: torch.rand(batch, 3, 32, 32),
        "MLP": lambda: torch.rand(batch, 784),
        "LSTM": lambda: torch.randint(5000, (batch, 35)),
    }[name]()
    labels = torch.randint(10, (batch,))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        barrier()
        started = time.perf_counter()
        for _ in range(int(line)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        barrier()
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)
    os._exit(0)  # the other ranks may have ended


if __name__ == "__main__":
    main()
