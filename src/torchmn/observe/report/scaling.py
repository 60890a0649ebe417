"""How throughput grows with the number of ranks: speed-up, efficiency and Amdahl's law.

A part ``s`` of the work of one rank does not become shorter with more ranks: the speed-up on ``n``
ranks is ``1 / (s + (1 - s) / n)`` (G. Amdahl, 1967). ``s`` is fitted to all runs by least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchmn.observe.report.summary import Summary


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run."""

    folder: str
    num_ranks: int
    num_hosts: int
    rate: float
    speedup: float
    """Over one rank; over the smallest runs, times their ranks, where none had one."""
    efficiency: float


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Runs on several numbers of ranks, the smallest first."""

    points: tuple[Point, ...]
    unit: str
    """Of the rate: ``samples/s``, or ``rank steps/s`` where samples were not recorded."""
    serial_share: float | None
    """Of Amdahl's law; None for runs of one size."""

    def amdahl(self, num_ranks: float) -> float:
        """The fitted speed-up."""
        share = self.serial_share or 0.0
        base = self.points[0].num_ranks
        return base / (share + (1 - share) * base / num_ranks)


def scaling_of(summaries: Sequence[Summary]) -> Scaling:
    """Compare runs of one training on several numbers of ranks."""
    rates = [summary.samples_per_s for summary in summaries]
    if any(rate is None for rate in rates):
        rates = [summary.run.size * summary.steps_per_s for summary in summaries]
        unit = "rank steps/s"
    else:
        unit = "samples/s"
    runs = sorted(
        ((s.run.size, rate or 0.0, s) for s, rate in zip(summaries, rates, strict=True)),
        key=lambda run: run[:2],
    )
    base = runs[0][0]
    smallest = [rate for size, rate, _ in runs if size == base]
    per_rank = sum(smallest) / len(smallest) / base
    points = tuple(
        Point(
            folder=str(summary.run.folder),
            num_ranks=size,
            num_hosts=len(summary.hosts),
            rate=rate,
            speedup=rate / per_rank,
            efficiency=rate / per_rank / size,
        )
        for size, rate, summary in runs
    )
    return Scaling(points=points, unit=unit, serial_share=_serial_share(points))


def _serial_share(points: Sequence[Point]) -> float | None:
    base = points[0].num_ranks
    terms = [
        (base / point.speedup - base / point.num_ranks, 1 - base / point.num_ranks)
        for point in points
        if point.num_ranks > base
    ]
    if not terms:
        return None
    fitted = sum(above * weight for above, weight in terms) / sum(w * w for _, w in terms)
    return min(1.0, max(0.0, fitted))
