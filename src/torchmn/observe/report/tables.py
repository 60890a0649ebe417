"""Tables of a report, which the page and the terminal show (cells are text), and scaling.

How throughput grows with the number of ranks: a part ``s`` of the work of one rank does not become
shorter with more ranks, so the speed-up on ``n`` ranks is ``1 / (s + (1 - s) / n)`` (G. Amdahl,
1967). ``s`` is fitted to all runs by least squares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchmn.cluster.units import grouped
from torchmn.observe.report.summary import (
    Summary,
    bits,
    duration,
    megabytes,
    number_list,
    rank_list,
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a scaling comparison."""

    folder: str
    num_ranks: int
    num_hosts: int
    rate: float
    speedup: float  # over one rank; over the smallest runs, times their ranks, where none had one
    efficiency: float


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Runs on several numbers of ranks, the smallest first."""

    points: tuple[Point, ...]
    unit: str  # of the rate: ``samples/s``, or ``rank steps/s`` where samples were not recorded
    serial_share: float | None  # of Amdahl's law; None for runs of one size

    def amdahl(self, num_ranks: float) -> float:
        """Speed-up on a number of ranks, as fitted by Amdahl's law."""
        share = self.serial_share or 0.0
        base = self.points[0].num_ranks
        return base / (share + (1 - share) * base / num_ranks)


def scaling_of(summaries: Sequence[Summary]) -> Scaling:
    """Compare runs of the same training on several numbers of ranks."""
    rates = [summary.samples_per_s for summary in summaries]
    if any(rate is None for rate in rates):
        rates = [summary.run.size / summary.step_s for summary in summaries]
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


MAX_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts. The first column has the heads of rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def scaling_table(scaling: Scaling) -> Table:
    """Make the table of runs on several numbers of ranks."""
    return Table(
        columns=("ranks", "hosts", scaling.unit, "speed-up", "Amdahl", "efficiency", "run"),
        rows=[
            (
                str(point.num_ranks),
                str(point.num_hosts),
                f"{point.rate:,.1f}",
                f"{point.speedup:.2f}",
                f"{scaling.amdahl(point.num_ranks):.2f}",
                f"{point.efficiency:.1%}",
                point.folder,
            )
            for point in scaling.points
        ],
    )


def links_table(summary: Summary) -> Table:
    """Make the table of links between hosts, those that carry most first."""
    return Table(
        columns=("link", "per step", "rate while busy", "nominal"),
        rows=[
            (
                f"{link.source} to {link.target}",
                megabytes(link.nbytes_per_step),
                bits(link.bytes_per_s),
                bits(link.nominal_bytes_per_s) if link.nominal_bytes_per_s else "unknown",
            )
            for link in summary.links
        ],
    )


def memory_table(summary: Summary) -> Table:
    """Make the table of the memory of ranks, those that have the most first."""
    ranks = [rank for rank in summary.ranks if rank.memory[1].any()]
    ranks.sort(key=lambda rank: -rank.memory[1].max())
    return Table(
        columns=("rank", "host", "of", "at first", "at most", "at last"),
        rows=[
            (
                str(rank.start.rank),
                rank.start.host,
                kind,
                *(f"{each / 1e9:.2f} GB" for each in (nbytes[0], nbytes.max(), nbytes[-1])),
            )
            for rank in ranks[:MAX_ROWS]
            for kind, nbytes in zip(("process", "device"), rank.memory[1:], strict=True)
            if nbytes.any()
        ],
    )


def slow_steps_table(summary: Summary) -> Table:
    """Make the table of the slowest steps and their causes."""
    return Table(
        columns=("slow step", "lasted", "because"),
        rows=[
            (
                f"{slow.step:,}",
                duration(slow.seconds),
                ("all ranks" if slow.rank is None else f"rank {slow.rank}")
                + f": {duration(slow.excess_s)} more than usual in {slow.phase}",
            )
            for slow in summary.slowest_steps()
        ],
    )


def placement_table(summary: Summary) -> Table:
    """Make the table of ranks and hosts, with consecutive ranks of a host in one row if many."""
    starts = [rank.start for rank in summary.run.ranks]
    if len(starts) > MAX_ROWS:
        by_host = grouped((start.host, start.rank) for start in starts)
        return Table(
            columns=("host", "ranks"),
            rows=[(host, rank_list(ranks)) for host, ranks in list(by_host.items())[:256]],
        )
    return Table(
        columns=("rank", "host", "local rank", "device", "cores", "process"),
        rows=[
            (
                str(start.rank),
                start.host,
                str(start.intra_rank),
                start.device,
                number_list(start.cpus, max_parts=4) if start.cpus else "",
                str(start.pid),
            )
            for start in starts
        ],
    )
