"""Ordinary loops on the ranks of a job, each compared with the same loop in one process.

Rank 0 writes a JSON file: by loop, the largest difference of a parameter on each rank; and the
transports. The gradients (1.5 MB) are large enough for TCP connections between hosts.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import torchmn
from torchmn.data import shard_bounds

LOOPS = ("plain", "clip", "ema", "amp", "compile", "recompute", "two optimizers", "load")
BATCH, NUM_STEPS = 10, 7


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 5)
    )


def train(loop: str, comm: torchmn.Communicator | None) -> Tensor:
    """The parameters after some steps; without a communicator, of one process without torchmn."""
    model = network()
    parts = [model[:3], model[3:]] if loop == "two optimizers" else [model]
    optimizers: list[Any] = [
        torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in parts
    ]
    if comm is not None:
        optimizers = [
            torchmn.create_multi_node_optimizer(each, comm, model, weight="samples")
            for each in optimizers
        ]
    average = torch.optim.swa_utils.AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=loop == "amp")
    called = torch.compile(model, backend="eager") if loop == "compile" else model
    generator = torch.Generator().manual_seed(1)
    for step in range(NUM_STEPS):
        x = torch.randn(BATCH, 64, generator=generator)
        y = torch.randint(5, (BATCH,), generator=generator)
        if comm is not None:  # parts of different sizes where the ranks do not divide the batch
            begin, end = shard_bounds(BATCH, comm.size, comm.rank, force_equal_length=False)
            x, y = x[begin:end], y[begin:end]
        for optimizer in optimizers:
            optimizer.zero_grad()
            if comm is not None:
                optimizer.set_weight(len(x))
        if loop == "recompute":
            logits = model[4](checkpoint(model[:4], x, use_reentrant=False))
        else:
            logits = called(x)
        scaler.scale(cross_entropy(logits, y)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if loop in ("clip", "amp"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
        if loop == "load" and step == NUM_STEPS // 2:
            saved = copy.deepcopy([each.state_dict() for each in (model, *optimizers)])
            for each, state in zip((model, *optimizers), saved, strict=True):
                each.load_state_dict(state)
    trained = average.module if loop == "ema" else model
    return nn.utils.parameters_to_vector(trained.parameters()).detach()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    comm = torchmn.create_communicator("hierarchical")
    found = {}
    for loop in LOOPS:
        apart = (train(loop, comm) - train(loop, None)).abs().max().item()
        found[loop] = comm.allgather_obj(apart)
    if comm.rank == 0:
        made = {"differences": found, "transport": comm.settings["transport"]}
        Path(sys.argv[1]).write_text(json.dumps(made))
    comm.finalize()


if __name__ == "__main__":
    torchmn.run_main(main)
