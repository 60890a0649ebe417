"""The processor time of the main thread for each parameter and step, beside DDP.

    bench_main_thread.py [--layers N] [--width N] [--units N] [--steps N]

Rank 0 of two exchanges over a transport that returns at once, and DDP over a group of one rank,
whose sums another thread makes: what is left is what each side computes in ``backward()`` and
``step()`` by itself. The same model trained alone is subtracted from both, and they take turns.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from record import Bar, median_bar, ratio_bar, report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchmn
from torchmn.comm import Communicator
from torchmn.testing import run_ranks

Step = Callable[[], None]
LIMIT = "<= 1.3"
MAX_FOOTER = 64
"""At least as many elements as a footer has beside a flag for each parameter."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--units", type=int, default=15, help="turns of every side")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    samples = _measure(arguments)
    dist.destroy_process_group()
    us = {side: [1e6 * value for value in values] for side, values in samples.items()}
    bars: list[Bar] = [median_bar(f"{side}, us a parameter", us[side], "us") for side in us]
    bars.append(ratio_bar("torchmn / DDP, main thread", us["torchmn"], us["DDP"], LIMIT))
    return report("main_thread", bars)


def _model(arguments: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    width = arguments.width
    layers = [nn.Linear(width, width) for _ in range(arguments.layers)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)  # gradients of one size: denormal numbers are slow
    return nn.Sequential(*layers)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> Step:
    x = torch.ones(4, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def _measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds for each parameter and step on each side, turn by turn."""
    alone = _model(arguments)
    num_parameters = len(list(alone.parameters()))
    theirs = DistributedDataParallel(_model(arguments))
    ended = threading.Event()
    samples: dict[str, list[float]] = {"torchmn": [], "DDP": []}

    def rank_main(comm: Communicator) -> None:
        ours = _model(arguments)
        optimizer = torchmn.create_multi_node_optimizer(_sgd(ours), comm, ours)
        if comm.rank != 0:
            ended.wait()
        else:
            comm.world.transport.all_reduce_ = _returns_at_once(  # type: ignore[method-assign]
                comm.size, num_parameters + MAX_FOOTER
            )
            steps = {
                "alone": _step(alone, _sgd(alone), arguments.width),
                "torchmn": _step(ours, optimizer, arguments.width),
                "DDP": _step(theirs, _sgd(theirs), arguments.width),
            }
            try:
                for unit in range(arguments.units + 1):
                    seconds = {side: _seconds(step, arguments) for side, step in steps.items()}
                    for side in samples if unit else ():  # the first one warms up
                        extra = seconds[side] - seconds["alone"]
                        samples[side].append(extra / num_parameters)
            finally:
                ended.set()
        optimizer.close()

    run_ranks(rank_main, 2, timeout_s=600)
    return samples


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.0)


def _returns_at_once(size: int, num_footer: int) -> Callable[..., None]:
    def all_reduce_(buffer: torch.Tensor, *_: object, **__: object) -> None:
        buffer[-num_footer:].mul_(size)  # the footer, whose counts must be those of all ranks

    return all_reduce_


def _seconds(step: Step, arguments: argparse.Namespace) -> float:
    """Processor time of this thread for a step."""
    begin = time.thread_time()
    for _ in range(arguments.steps):
        step()
    return (time.thread_time() - begin) / arguments.steps


if __name__ == "__main__":
    raise SystemExit(main())
