"""The table of docs/reference/exit-status.md: what happens to a job, and its exit status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "exit-status.md"
Launcher = Literal["local", "ssh", "mpirun", "torchrun", "srun", "plain mpirun", "plain torchrun"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
"""The columns of the page."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that happens. ``script`` is the mode of the script of the test.

    ``signum`` is sent to ``target``; ``statuses`` are those of the launchers that are tested.
    """

    what: str
    sees: str
    script: Literal["ends", "exits", "raises", "waits", "saves"]
    signum: str = ""
    target: Literal["launcher", "agents", "one script"] = "launcher"
    statuses: Mapping[Launcher, int]


def same(status: int, **others: int) -> dict[Launcher, int]:
    """The same status under all launchers but these; 0 or more where it differs."""
    named = {name.replace("_", " "): code for name, code in others.items()}
    return {name: named.get(name, status) for name in LAUNCHERS if named.get(name, 0) >= 0}


ROWS = (
    Row(what="All ranks end", sees="-", script="ends", statuses=same(0)),
    Row(
        what="A rank exits with status 3",
        sees="the others: SIGTERM",
        script="exits",
        statuses=same(3, plain_torchrun=1),
    ),
    Row(
        what="A rank raises an exception",
        sees="the others: SIGTERM",
        script="raises",
        statuses=same(1),
    ),
    Row(
        what="A rank is ended by SIGKILL",
        sees="the others: SIGTERM",
        script="waits",
        signum="SIGKILL",
        target="one script",
        statuses=same(137, plain_torchrun=1),
    ),
    Row(
        what="SIGTERM to the launcher",
        sees="SIGTERM, once",
        script="waits",
        signum="SIGTERM",
        statuses=same(143, plain_mpirun=1, plain_torchrun=1),
    ),
    Row(
        what="SIGTERM to the launcher, the ranks save",
        sees="SIGTERM, once",
        script="saves",
        signum="SIGTERM",
        statuses=same(85, plain_mpirun=1, plain_torchrun=1),
    ),
    Row(
        what="SIGUSR1 to the launcher, the ranks save",
        sees="SIGUSR1, once",
        script="saves",
        signum="SIGUSR1",
        statuses=same(85, plain_torchrun=-1),
    ),
    Row(
        what="SIGTERM to the agents, as from a scheduler's step, the ranks save",
        sees="SIGTERM, once",
        script="saves",
        signum="SIGTERM",
        target="agents",
        statuses=same(85, plain_mpirun=-1, plain_torchrun=-1),
    ),
    Row(
        what="SIGUSR2 to the agents, as from a scheduler's step, the ranks save",
        sees="SIGUSR2, once",
        script="saves",
        signum="SIGUSR2",
        target="agents",
        statuses=same(85, plain_mpirun=-1, plain_torchrun=-1),
    ),
    Row(
        what="SIGINT to the launcher (Ctrl-C)",
        sees="SIGINT",
        script="waits",
        signum="SIGINT",
        statuses=same(130, plain_mpirun=1, plain_torchrun=1),
    ),
    Row(
        what="SIGHUP to the launcher",
        sees="SIGTERM",
        script="waits",
        signum="SIGHUP",
        statuses=same(129, plain_mpirun=-1, plain_torchrun=1),
    ),
    Row(
        what="SIGKILL to the launcher",
        sees="SIGTERM",
        script="saves",
        signum="SIGKILL",
        statuses=same(137, plain_mpirun=-1, plain_torchrun=-1),
    ),
)


def table() -> str:
    """The table of the page."""
    lines = [f"| what happens | the script sees | {' | '.join(LAUNCHERS)} |"]
    lines.append("|---" * (len(LAUNCHERS) + 2) + "|")
    for row in ROWS:
        codes = [str(row.statuses.get(name, "")) for name in LAUNCHERS]
        lines.append(f"| {row.what} | {row.sees} | {' | '.join(codes)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
