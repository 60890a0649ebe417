"""All runs, one line of JSON each, appended as they finish."""

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
    """``accuracy`` in per cent on the test images; ``loss`` of the final model on training images,
    ``test_loss`` on the test images.

    ``curve`` and ``hits`` hold mean loss and accuracy of consecutive steps, each taken before the
    step. ``settings`` is a checksum of the task and the side: runs with other settings are not
    compared. ``commit`` is the commit of the code, unknown for the earliest runs.
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
    commit: str = ""
    test_loss: float = float("nan")

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
        """What identifies the run."""
        return self.task, self.side, self.seed

    def __str__(self) -> str:
        what = f"{self.task}, {self.side}, seed {self.seed}: "
        if self.status != "done":
            return f"{what}{self.status} ({self.why})"
        return f"{what}{self.accuracy:.2f} %, loss {self.loss:.4f}, {self.seconds:.1f} s"


def settings_of(task: Task, side: Side) -> int:
    """A checksum of what a run depends on."""
    of_the_task = asdict(task) | {"network": task.network.__name__}
    of_the_side = asdict(side) | {"note": ""}
    for name in ("seeds", "fresh_seeds"):
        del of_the_task[name]
    # These names are part of the checksums of recorded runs.
    described = [of_the_task | {"sides": None, "num_seeds": None, "goal": None}, of_the_side]
    return zlib.crc32(json.dumps(described, sort_keys=True).encode())


def append(path: Path, run: Run) -> None:
    """Append a run to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def load(path: Path, known: Iterable[tuple[Task, Side]]) -> dict[Key, Run]:
    """The latest run of each key with the current settings."""
    settings = {(task.name, side.name): settings_of(task, side) for task, side in known}
    runs: dict[Key, Run] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            run = Run(**json.loads(line))
            if settings.get((run.task, run.side)) == run.settings:
                runs[run.key] = run
    return runs
