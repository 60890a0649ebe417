"""Staleness: how many updates came between the pull and the push of a gradient."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class WorkerStaleness:
    """The staleness of one worker since its optimizer was made.

    >>> from torchmn.exchange.schedules import WorkerStaleness
    >>> WorkerStaleness(num_updates=10, mean=0.5, max=2, max_steps_ahead=1).max
    2
    """

    num_updates: int
    mean: float
    """Updates, its own too, between the pull on which a gradient was taken and its push."""
    max: int
    max_steps_ahead: int
    """Ahead of the slowest worker, when this one began its next step."""


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """The bound, every worker by rank, and the number of updates with each staleness.

    >>> from torchmn.exchange.schedules import Staleness, WorkerStaleness
    >>> one = WorkerStaleness(num_updates=2, mean=0.5, max=1, max_steps_ahead=1)
    >>> Staleness(max_staleness=4, workers={1: one}, histogram={0: 1, 1: 1}).workers[1].mean
    0.5
    """

    max_staleness: int
    workers: Mapping[int, WorkerStaleness]
    histogram: Mapping[int, int]

    def __str__(self) -> str:
        lines = [f"staleness in updates; at most {self.max_staleness} steps ahead are allowed"]
        lines += [
            f"rank {rank}: mean {w.mean:.2f}, max {w.max} in {w.num_updates} updates, at most "
            f"{w.max_steps_ahead} steps ahead"
            for rank, w in sorted(self.workers.items())
        ]
        lines += [f"{late} updates late: {num}" for late, num in sorted(self.histogram.items())]
        return "\n".join(lines)


@dataclass
class StalenessRecord:
    """The record of one worker."""

    # Number of pushes by how many updates they were late.
    counts: Counter[int] = field(default_factory=Counter)
    max_steps_ahead: int = 0

    def add(self, num_updates_late: int, num_steps_ahead: int) -> None:
        """Record one push."""
        self.counts[num_updates_late] += 1
        self.max_steps_ahead = max(self.max_steps_ahead, num_steps_ahead)


def report(max_staleness: int, records: Mapping[int, StalenessRecord]) -> Staleness:
    """Summarize the records of workers, by rank; those without updates are omitted."""
    workers = {
        rank: WorkerStaleness(
            num_updates=record.counts.total(),
            mean=sum(late * num for late, num in record.counts.items()) / record.counts.total(),
            max=max(record.counts),
            max_steps_ahead=record.max_steps_ahead,
        )
        for rank, record in records.items()
        if record.counts
    }
    histogram: Counter[int] = Counter()
    for record in records.values():
        histogram.update(record.counts)
    return Staleness(
        max_staleness=max_staleness, workers=workers, histogram=dict(sorted(histogram.items()))
    )
