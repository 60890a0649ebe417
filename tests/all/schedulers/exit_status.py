"""The second table of docs/reference/exit-status.md: jobs of `torchmn submit` under a scheduler."""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "exit-status.md"
SCHEDULERS = {"slurm": "Slurm", "grid_engine": "Grid Engine", "pbs": "OpenPBS"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that happens; ``statuses`` are those of ``--wait``, in the order of the columns."""

    what: str
    sees: str
    statuses: tuple[int, int, int]

    def status(self, scheduler: str) -> int:
        return self.statuses[list(SCHEDULERS).index(scheduler)]


ALL_EXIT = Row(what="All ranks exit with status 3", sees="-", statuses=(3, 3, 3))
NO_QUEUE = Row(what="There is no such queue", sees="is not started", statuses=(1, 1, 1))
CANCELLED = Row(
    what="`scancel`, `qdel`; the ranks save",
    sees="SIGTERM (Grid Engine: SIGUSR2, with `--requeue`)",
    statuses=(85, 85, 85),
)
TOO_LATE = Row(
    what="The time limit passes, the ranks ignore SIGTERM",
    sees="SIGTERM (Grid Engine: nothing), SIGKILL",
    statuses=(143, 137, 1),
)
IN_TIME = Row(
    what="The time limit is near, the ranks save, `--requeue`",
    sees="-, `Preemption` reads the limit",
    statuses=(0, 0, 0),
)
SIGNALLED = Row(
    what="SIGUSR1 (`--signal`; Slurm: `scancel --batch`), the ranks save, `--requeue`",
    sees="SIGUSR1, once",
    statuses=(0, 0, 0),
)
TAKEN_AWAY = Row(
    what="A job of higher priority (Grid Engine: suspension), `qrerun`, with `--requeue`",
    sees="SIGTERM (Grid Engine: SIGUSR1)",
    statuses=(0, 0, 0),
)
NODE_FAILED = Row(what="A node fails", sees="the others: SIGTERM", statuses=(1, 1, 255))
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
