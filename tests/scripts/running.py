"""Runs a script in one process and on ranks, and compares what it returns and logs."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.errors import TorchmnError
from torchmn.exchange.schedules.base import Schedule
from torchmn.testing import run_ranks

from .registry import Refused, Script
from .worker import IsolatedRank, Rank, Worker

SMALL_BYTES = 256  # of a bucket, so that these small models have several
SCHEDULES_MADE: dict[str, Callable[[], str | Schedule]] = {
    "every_step": lambda: "every_step",
    "auto": lambda: "auto",
}
MAX_LINES = 8  # of differences that are shown
Outcomes = dict[str, Any]  # what a script returned and logged, by name


@functools.cache
def alone(script: Script) -> Outcomes:
    """What one process gets from whole batches, without torchmn."""
    return _outcomes(script.reference, Worker())


def on_ranks(script: Script, world_size: int, schedule: str) -> list[Outcomes | TorchmnError]:
    """What each rank gets, each on a host of its own, or the error that ended it."""

    def rank_main(comm: Communicator) -> Outcomes | TorchmnError:
        comm.route.bucket_bytes = SMALL_BYTES
        try:
            return _outcomes(script.program, Rank(comm, SCHEDULES_MADE[schedule]))
        except TorchmnError as error:
            return error

    hosts = Topology(tuple(f"host{rank}" for rank in range(world_size)))
    return run_ranks(rank_main, world_size, topology=hosts)


def on_isolated_ranks(script: Script, world_size: int) -> list[Outcomes]:
    """What each rank gets if nothing is exchanged: an optimizer that is broken on purpose."""
    return [_outcomes(script.program, IsolatedRank(rank, world_size)) for rank in range(world_size)]


def differences(script: Script, found: Outcomes) -> list[str]:
    """Descriptions of where it is not what one process gets."""
    wanted = alone(script)
    if list(found) != list(wanted):
        return [f"one process has {list(wanted)}, the rank has {list(found)}"]
    return [
        f"{name}: {text}"
        for name in wanted
        if (text := _difference(wanted[name], found[name], script.tolerance))
    ]


def check_exact(script: Script, results: list[Outcomes | TorchmnError]) -> None:
    """Raise the error of a rank, or AssertionError with every difference."""
    for found in results:
        if isinstance(found, TorchmnError):
            raise found
    lines = [
        f"rank {rank}: {text}"
        for rank, found in enumerate(results)
        if not isinstance(found, TorchmnError)
        for text in differences(script, found)
    ]
    more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    text = "\n".join([*lines[:MAX_LINES], *more])
    assert not lines, f"{script.name} differs from one process\n{text}"


def check_refused(expected: Refused, results: list[Outcomes | TorchmnError]) -> None:
    """Raise AssertionError unless every rank refuses with the same text."""
    for rank, found in enumerate(results):
        assert isinstance(found, TorchmnError), f"rank {rank} accepted it"
        assert expected.text in str(found), f"rank {rank} refused with another text: {found}"


def _outcomes(program: Callable[[Worker], Any], worker: Worker) -> Outcomes:
    returned = program(worker)
    outcomes: Outcomes = {}
    parts = returned if isinstance(returned, tuple | list) else [returned]
    for i, part in enumerate(parts):
        values = part.state_dict() if isinstance(part, nn.Module) else {"value": part}
        for name, value in values.items():
            is_tensor = isinstance(value, Tensor)
            outcomes[f"{i}.{name}"] = value.detach().clone() if is_tensor else value
    for i, (name, value) in enumerate(worker.logged):
        outcomes[f"{name} (logged {i})"] = value
    return outcomes


def _difference(wanted: Any, found: Any, tolerance: float) -> str:
    if not isinstance(wanted, Tensor | float) or not isinstance(found, Tensor | float):
        return "" if wanted == found else f"one process has {wanted}, the rank has {found}"
    a, b = (torch.as_tensor(v) for v in (wanted, found))
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"one process has {a.dtype} {list(a.shape)}, the rank has {b.dtype} {list(b.shape)}"
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    worst = ((a - b).abs() / (1 + a.abs())).max().item() if a.numel() else 0.0
    return "" if worst <= tolerance else f"off by {worst:.3g} of 1 + value"
