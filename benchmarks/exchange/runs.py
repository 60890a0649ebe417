"""All runs, one line of JSON each, appended as they finish; none is ever removed.

The earliest runs were replaced when the same sides were measured again. Those that are left come
first in the file and have no date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import RECORDS

RECORD = RECORDS / "exchange.jsonl"
NUM_RUNS_PER_LIMIT = 3
"""A limit is checked against the turns of this number of usable runs, the newest ones."""

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


def newest(runs: Sequence[Run], is_usable: Callable[[Run], bool]) -> list[Run]:
    """The newest usable runs, at most `NUM_RUNS_PER_LIMIT`, oldest first."""
    return [run for run in runs if is_usable(run)][-NUM_RUNS_PER_LIMIT:]


def has_turns(run: Run, *sides: str) -> bool:
    """Whether all of these sides were timed in the run."""
    return {*sides} <= {turn["side"] for turn in run["turns"]}
