"""Staleness: the number of updates between the pull and the push of a gradient."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerStaleness:
    """The staleness of one worker since its optimizer was created.

    >>> from torchmn.exchange.schedules.parameter_server.staleness import WorkerStaleness
    >>> WorkerStaleness(num_updates=10, mean=0.5, max=2, max_steps_ahead=1).max
    2
    """

    num_updates: int
    mean: float
    """Mean number of updates, including its own, between the pull of the parameters at which a
    gradient was computed and its push."""
    max: int
    """Largest such number."""
    max_steps_ahead: int
    """Largest number of steps ahead of the slowest worker, when this one began its next step."""


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """The staleness of all workers by rank, its bound, and a histogram of updates.

    >>> from torchmn.exchange.schedules.parameter_server.staleness import Staleness, WorkerStaleness
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


# For one worker: the number of its pushes by how many updates they were late, and the largest
# number of steps that it was ahead.
StalenessRecord = tuple[Counter[int], int]


def report(max_staleness: int, records: Mapping[int, StalenessRecord]) -> Staleness:
    """Summarize the records of workers, by rank; those without updates are omitted."""
    workers, histogram = {}, Counter[int]()
    for rank, (counts, max_ahead) in records.items():
        histogram.update(counts)
        if total := counts.total():
            mean = sum(late * num for late, num in counts.items()) / total
            workers[rank] = WorkerStaleness(
                num_updates=total, mean=mean, max=max(counts), max_steps_ahead=max_ahead
            )
    return Staleness(
        max_staleness=max_staleness, workers=workers, histogram=dict(sorted(histogram.items()))
    )
