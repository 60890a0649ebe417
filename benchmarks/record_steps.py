"""What `bench_record.py` starts on every test host: turns of steps, recorded, not recorded, alone.

    RANK=... WORLD_SIZE=... MASTER_ADDR=... record_steps.py MODEL

Every line of the input is a side and a number of steps; for each it prints a line of JSON: the
seconds of every step, and for the recorded side what `torchmn report` makes of its record.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import torchmn
from torchmn.profiling.run_reader import read_run
from torchmn.report.summary import summarize

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models.vgg import VGG

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
        with tempfile.TemporaryDirectory() as own_folder:
            folder = comm.bcast_obj(own_folder)
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
                comm.barrier()
                answer["record"] = _record(recording.folder)
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


def _record(folder: Path) -> dict[str, float]:
    """Shares of the step, and what they consist of, in the words of the report."""
    summary = summarize(read_run(folder))
    return {
        "seconds": summary.step_s,
        "exposed": summary.share_of_exposed_exchange,
        "waited_s": float(summary.waited_s.mean()),
        "taken_s": float(summary.taken_s.mean()),
        "waiting": summary.share_of_waiting,
    }


if __name__ == "__main__":
    main()
