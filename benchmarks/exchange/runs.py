"""The runs that were carried out, one line of JSON each, added as they come; none is ever removed.

Runs of early days were kept only until the same sides were measured again. Those that are left of
them, here and in the history of the file, stand first; they say nothing of their date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import RECORDS

RECORD = RECORDS / "exchange.jsonl"
NUM_JUDGED = 3
"""A limit is judged on the newest so many runs that can judge it, good or bad, all turns together.
"""

Run = Mapping[str, Any]
"""What `measure` returns, with the line and the environment: ``sides``, ``plans``, ``turns``."""


def append(path: Path, line: str, run: Run) -> None:
    """Add a run of a line of the table to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"line": line, **run}) + "\n")


def load(path: Path) -> dict[str, list[Run]]:
    """All runs by line, the oldest first; empty without a file."""
    runs: dict[str, list[Run]] = {}
    if path.exists():
        for text in path.read_text().splitlines():
            run = json.loads(text)
            runs.setdefault(run["line"], []).append(run)
    return runs


def judged(runs: Sequence[Run], can_judge: Callable[[Run], bool]) -> list[Run]:
    """The newest runs that can judge something, `NUM_JUDGED` at most, the oldest of them first."""
    return [run for run in runs if can_judge(run)][-NUM_JUDGED:]


def has_turns(run: Run, *sides: str) -> bool:
    """Whether all of these sides took turns in the run."""
    return {*sides} <= {turn["side"] for turn in run["turns"]}
