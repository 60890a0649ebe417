"""Count the Python calls that torchmn makes in a training step.

    .venv/bin/python scripts/count_calls.py [--layers N] [--list]

Two ranks, threads of this process, train N linear layers with ``every_step``. Rank 0 counts the
calls of functions of torchmn in ``zero_grad()``, ``backward()`` and ``step()`` of a step after the
first few, and the files that they are in. ``--list`` prints them in their order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import torchmn
from torchmn.comm import Communicator
from torchmn.testing import run_ranks

SOURCES = str(Path(torchmn.__file__).parent)
NUM_STEPS_BEFORE = 6
Call = tuple[str, str]
"""The file and the name of a function."""


def main() -> None:
    """Print what one step calls."""
    parser = argparse.ArgumentParser(description="count the Python calls of torchmn in a step")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--list", action="store_true", help="print the calls in their order")
    arguments = parser.parse_args()
    for name, calls in count_calls(arguments.layers).items():
        print(f"{name}: {len(calls)} calls in {len({file for file, _ in calls})} files")
        if arguments.list:
            print("\n".join(f"    {file} {function}" for file, function in calls))


def count_calls(num_layers: int = 8) -> dict[str, list[Call]]:
    """The calls of rank 0 in each part of a step, in their order."""

    def rank_main(comm: Communicator) -> dict[str, list[Call]]:
        layers = [torch.nn.Linear(16, 16) for _ in range(num_layers)]
        model = torch.nn.Sequential(*layers)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
        calls: dict[str, list[Call]] = {}
        for _ in range(NUM_STEPS_BEFORE):
            calls = {"zero_grad": calls_in(optimizer.zero_grad)}
            loss = model(torch.ones(4, 16)).sum()
            calls["backward"] = calls_in(loss.backward)
            calls["step"] = calls_in(optimizer.step)
        comm.barrier()
        optimizer.close()
        return calls

    return run_ranks(rank_main, 2)[0]


def calls_in(function: Callable[[], object]) -> list[Call]:
    """The calls of functions of torchmn on this thread while ``function`` runs."""
    calls: list[Call] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES):
            file = code.co_filename[len(SOURCES) + 1 :]
            calls.append((file, getattr(code, "co_qualname", code.co_name)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def num_hooks(calls: list[Call]) -> int:
    """How many hooks of gradients were functions of Python."""
    return calls.count(("exchange/parameter_hook.py", "GradientHook.__call__"))


if __name__ == "__main__":
    main()
