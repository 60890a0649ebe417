"""What `bench_record.py` starts on every test host: turns of steps, recorded, not recorded, alone.

    RANK=... WORLD_SIZE=... MASTER_ADDR=... record_steps.py MODEL

Every line of the input is a side and a number of steps; for each it prints a line of JSON: the
seconds of every step, and for the recorded side what its record has of them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import torchmn
from torchmn.control.codec import decode_union
from torchmn.profiling.records import Line, Phase, Step

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models.vgg import VGG

EXCHANGE: tuple[Phase, ...] = ("exchange", "encode", "decode")
NUM_SKIPPED = 2
"""Steps at the beginning of a turn that do not count."""


def main() -> None:
    torch.set_num_threads(1)
    comm = torchmn.create_communicator()
    torch.manual_seed(comm.rank)
    models = [_model(sys.argv[1]) for _ in range(2)]
    batch = torch.randn((32, 3, 32, 32) if sys.argv[1] == "vgg" else (100, 784))
    labels = torch.randint(10, (len(batch),))
    alone: torch.optim.Optimizer = torch.optim.SGD(models[0].parameters(), 0.001)
    exchanging = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(models[1].parameters(), 0.001), comm, models[1]
    )
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        side, num_steps = line.split()
        model, optimizer = (models[0], alone) if side == "alone" else (models[1], exchanging)
        with tempfile.TemporaryDirectory() as folder:
            recording = torchmn.profiling.record(comm, folder) if side == "recorded" else None
            comm.barrier()
            seconds = []
            for _ in range(int(num_steps)):
                began = time.perf_counter()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch), labels).backward()
                optimizer.step()
                seconds.append(time.perf_counter() - began)
            answer: dict[str, object] = {"seconds": seconds[NUM_SKIPPED:]}
            if recording is not None:
                recording.close()
                file = recording.folder / "steps" / f"rank{comm.rank}.jsonl"
                answer["record"] = _record(file.read_text())
            comm.barrier()
        print(json.dumps(answer), flush=True)
    os._exit(0)  # the other ranks may have ended


def _model(name: str) -> nn.Module:
    if name == "vgg":
        return VGG(10)
    widths = (784, 1000, 1000, 10)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _record(text: str) -> dict[str, float]:
    """Medians over the steps that count: their seconds, and the share of the exposed exchange."""
    lines = [decode_union(line, Line) for line in text.splitlines()]
    steps = [line for line in lines if isinstance(line, Step)][NUM_SKIPPED:]
    exposed = [sum(step.phases.get(p, 0.0) for p in EXCHANGE) / step.seconds for step in steps]
    return {
        "seconds": statistics.median(step.seconds for step in steps),
        "exposed": statistics.median(exposed),
    }


if __name__ == "__main__":
    main()
