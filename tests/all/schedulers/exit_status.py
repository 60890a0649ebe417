"""The second table of docs/reference/exit-status.md: jobs of `torchmn submit` under a scheduler."""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "exit-status.md"
SCHEDULERS = {"slurm": "Slurm", "grid_engine": "Grid Engine", "pbs": "OpenPBS"}


@dataclass(frozen=True)
class Row:
    """One thing that happens; ``statuses`` are those of ``--wait``, in the order of the columns."""

    what: str
    sees: str
    statuses: tuple[int, int, int]

    def status(self, scheduler: str) -> int:
        return self.statuses[list(SCHEDULERS).index(scheduler)]


ALL_EXIT = Row("All ranks exit with status 3", "-", (3, 3, 3))
NO_QUEUE = Row("There is no such queue", "is not started", (1, 1, 1))
CANCELLED = Row(
    "`scancel`, `qdel`; the ranks save",
    "SIGTERM (Grid Engine: SIGUSR2, with `--requeue`)",
    (85, 85, 85),
)
TOO_LATE = Row(
    "The time limit passes, the ranks ignore SIGTERM",
    "SIGTERM (Grid Engine: nothing), SIGKILL",
    (143, 137, 1),
)
IN_TIME = Row(
    "The time limit is near, the ranks save, `--requeue`",
    "-, `Preemption` reads the limit",
    (0, 0, 0),
)
SIGNALLED = Row(
    "SIGUSR1 (`--signal`; Slurm: `scancel --batch`), the ranks save, `--requeue`",
    "SIGUSR1, once",
    (0, 0, 0),
)
TAKEN_AWAY = Row(
    "A job of higher priority (Grid Engine: suspension), `qrerun`, with `--requeue`",
    "SIGTERM (Grid Engine: SIGUSR1)",
    (0, 0, 0),
)
NODE_FAILED = Row("A node fails", "the others: SIGTERM", (1, 1, 255))
ROWS = (ALL_EXIT, NO_QUEUE, CANCELLED, TOO_LATE, IN_TIME, SIGNALLED, TAKEN_AWAY, NODE_FAILED)


def table() -> str:
    """The table of the page."""
    lines = [f"| what happens | the script sees | {' | '.join(SCHEDULERS.values())} |"]
    lines.append("|---" * (len(SCHEDULERS) + 2) + "|")
    for row in ROWS:
        lines.append(f"| {row.what} | {row.sees} | {' | '.join(map(str, row.statuses))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
