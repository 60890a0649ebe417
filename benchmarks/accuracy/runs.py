"""The runs that were carried out, one line of JSON each, added as they come."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from accuracy.sides import Side
from accuracy.tasks import Task

Status = Literal["done", "not built", "failed"]
Key = tuple[str, str, int]


@dataclass(frozen=True, kw_only=True)
class Run:
    """``accuracy`` in per cent on the test images; ``loss`` of the final model on training images.

    ``curve`` and ``hits`` hold mean loss and accuracy of consecutive steps, each taken before the
    step. ``settings`` is a checksum of everything that the task and the side say: runs with other
    settings are not compared.
    """

    task: str
    side: str
    seed: int
    settings: int
    status: Status
    why: str = ""
    seconds: float = 0.0
    accuracy: float = float("nan")
    loss: float = float("nan")
    num_steps: int = 0
    curve: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    staleness: dict[str, float] | None = None

    @classmethod
    def of(cls, task: Task, side: Side, seed: int, **outcome: object) -> Run:
        """A run of a side."""
        return cls(
            task=task.name,
            side=side.name,
            seed=seed,
            settings=settings_of(task, side),
            **outcome,  # type: ignore[arg-type]
        )

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.task, self.side, self.seed

    def __str__(self) -> str:
        what = f"{self.task}, {self.side}, seed {self.seed}: "
        if self.status != "done":
            return f"{what}{self.status} ({self.why})"
        return f"{what}{self.accuracy:.2f} %, loss {self.loss:.4f}, {self.seconds:.1f} s"


def settings_of(task: Task, side: Side) -> int:
    """A checksum of what a run depends on."""
    not_of_a_run = {"sides": None, "num_seeds": None, "goal": None}
    told = [
        asdict(task) | {"network": task.network.__name__} | not_of_a_run,
        asdict(side) | {"note": ""},
    ]
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


def append(path: Path, run: Run) -> None:
    """Add a run to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def load(path: Path, known: Iterable[tuple[Task, Side]]) -> dict[Key, Run]:
    """The latest run of each key whose settings are those of today."""
    settings = {(task.name, side.name): settings_of(task, side) for task, side in known}
    runs: dict[Key, Run] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            run = Run(**json.loads(line))
            if settings.get((run.task, run.side)) == run.settings:
                runs[run.key] = run
    return runs
