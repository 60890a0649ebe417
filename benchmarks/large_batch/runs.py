"""All runs of the large-batch table, one line of JSON each, appended as they finish."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accuracy.runs import Key, Run

from large_batch.sides import Side
from large_batch.tasks import BASE_BATCH, DECAY, MOMENTUM, Task

NUM_POINTS = 80
"""Points of a curve, over the samples of a run."""


@dataclass(frozen=True, kw_only=True)
class LargeRun(Run):
    """A run as those of `accuracy`: ``curve`` and ``hits`` have `NUM_POINTS` points.

    A run whose loss is no longer finite is done, with the accuracy of guessing, and ``why`` says at
    which step it was. ``noise`` is the gradient noise scale at the same points, where it was
    measured.
    """

    noise: list[float] = field(default_factory=list)


def settings_of(task: Task, side: Side) -> int:
    """A checksum of what a run depends on: of the task's chosen values those that the side uses."""
    warm_up = task.warm_up_epochs if side.warm_up_epochs is None else side.warm_up_epochs
    trust = task.trust.get(side.factor) if side.trust is None else side.trust
    described = {
        "data": [task.data, task.num_images, task.held_out, task.source.weight_decay],
        "network": network_name(task),
        "schedule": [task.epochs, list(task.milestones), DECAY, MOMENTUM],
        "batch": [BASE_BATCH, side.factor, side.recipe],
        "rate": side.learning_rate or task.learning_rate,
        "warm-up": warm_up if side.has_warm_up else None,
        "trust": trust if side.recipe == "LARS" else None,
    }
    return zlib.crc32(json.dumps(described, sort_keys=True).encode())


def network_name(task: Task) -> str:
    """The network and its width."""
    made = getattr(task.network, "func", task.network)
    return f"{made.__name__}{getattr(task.network, 'args', ())}"


def append(path: Path, run: LargeRun) -> None:
    """Append a run to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def load(path: Path, known: Iterable[tuple[Task, Side]]) -> dict[Key, LargeRun]:
    """The latest run of each key with the current settings."""
    settings = {(task.name, side.name): settings_of(task, side) for task, side in known}
    runs: dict[Key, LargeRun] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            run = LargeRun(**json.loads(line))
            if settings.get((run.task, run.side)) == run.settings:
                runs[run.key] = run
    return runs
