"""A training script as a user writes one, in a process of its own: what `bench_plain.py` starts.

    RANK=... WORLD_SIZE=... MASTER_ADDR=... plain_script.py SIDE

It is started by torchrun's variables and knows nothing of the other sides. Every line that it reads
is a number of steps to train, ended by a barrier. For each it prints a line of JSON: seconds per
step including the barrier, and counters of every step (wall-clock and processor seconds, page
faults, involuntary context switches).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models.vgg import VGG

SIDES = ("no-exchange", "ddp", "float32", "int8")
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    side = parser.parse_args().side

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = VGG(10)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if side == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif side != "no-exchange":
        import torchmn

        comm = torchmn.create_communicator()
        torchmn.seed_ranks(0, comm)  # each rank has its own dropout masks
        codec = None if side == "float32" else side
        optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model, codec=codec)

    generator = torch.Generator().manual_seed(rank)
    images = torch.randn((BATCH, 3, 32, 32), generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        steps = []
        dist.barrier()
        started = time.perf_counter()
        for _ in range(int(line)):
            before = _counters()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            after = _counters()
            steps.append({name: after[name] - before[name] for name in after})
        dist.barrier()
        seconds = (time.perf_counter() - started) / len(steps)
        print(json.dumps({"rank": rank, "seconds": seconds, "steps": steps}), flush=True)
    os._exit(0)  # the other ranks may have ended


def _counters() -> dict[str, float]:
    """Counters of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall_s": time.perf_counter(),
        "main_thread_s": time.thread_time(),
        "all_threads_s": time.process_time(),
        "system_s": usage.ru_stime,
        "page_faults": usage.ru_minflt,
        "involuntary_switches": usage.ru_nivcsw,
    }


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("plain_script.py needs torchrun's variables (RANK, WORLD_SIZE, ...).")
    main()
