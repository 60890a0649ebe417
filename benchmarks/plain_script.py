"""A training script as a user writes one, timed from outside: what `bench_plain.py` starts.

    RANK=... WORLD_SIZE=... MASTER_ADDR=... plain_script.py SIDE [--warm-up N] [--steps N]

It knows nothing of the other sides and runs in a fresh process, started by torchrun's variables.
Some steps warm up, the others are timed together, up to a barrier at the end. The last line of its
output is JSON: seconds per step up to the barrier, and for each step, those of the warm-up too,
its wall-clock seconds, processor seconds of the main thread and of all threads, and page faults.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--warm-up", type=int, default=4, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=12, help="steps that are timed")
    parser.add_argument("--batch", type=int, default=32, help="images of a rank in a step")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = VGG(10)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if arguments.side == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif arguments.side != "no-exchange":
        import torchmn

        comm = torchmn.create_communicator()
        torchmn.seed_ranks(0, comm)  # different dropout masks, as DDP's users seed by rank
        codec = None if arguments.side == "float32" else arguments.side
        optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model, codec=codec)

    generator = torch.Generator().manual_seed(rank)
    images = torch.randn((arguments.batch, 3, 32, 32), generator=generator)
    labels = torch.randint(10, (arguments.batch,), generator=generator)
    steps: list[dict[str, float]] = []

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            before = _usage()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            after = _usage()
            steps.append({name: after[name] - before[name] for name in after})

    train(arguments.warm_up)
    dist.barrier()
    begin = time.perf_counter()
    train(arguments.steps)
    dist.barrier()
    seconds = (time.perf_counter() - begin) / arguments.steps
    print(json.dumps({"rank": rank, "seconds": seconds, "steps": steps}), flush=True)
    if arguments.side not in ("no-exchange", "ddp"):
        comm.finalize()
    dist.destroy_process_group()


def _usage() -> dict[str, float]:
    """Counters of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    main_thread = resource.getrusage(resource.RUSAGE_THREAD)
    return {
        "wall_s": time.perf_counter(),
        "main_thread_s": time.thread_time(),
        "all_threads_s": time.process_time(),
        "page_faults": usage.ru_minflt,
        "main_thread_page_faults": main_thread.ru_minflt,
        "system_s": usage.ru_stime,
        "involuntary_switches": usage.ru_nivcsw,
    }


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("plain_script.py needs torchrun's variables (RANK, WORLD_SIZE, ...).")
    main()
