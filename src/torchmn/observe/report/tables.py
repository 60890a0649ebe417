"""Tables of a report, which the page and the terminal show. Cells are text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchmn.observe.report.scaling import Scaling
from torchmn.observe.report.summary import Summary, bits, duration, grouped, megabytes, rank_list

MAX_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first column has the heads of rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def scaling_table(scaling: Scaling) -> Table:
    """Runs on several numbers of ranks."""
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
    """Links between hosts, those that carry most first."""
    return Table(
        columns=("link", "per step", "rate while busy", "nominal"),
        rows=[
            (
                f"{link.source} to {link.target}",
                megabytes(link.nbytes_per_step),
                bits(link.bytes_per_s),
                bits(link.nominal_bytes_per_s) if link.nominal_bytes_per_s else "unknown",
            )
            for link in summary.busiest_links
        ],
    )


def slow_steps_table(summary: Summary) -> Table:
    """The slowest steps and their causes."""
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
    """Which rank is where; ranks of one host with consecutive numbers in one row if many."""
    starts = [rank.start for rank in summary.run.ranks]
    if len(starts) > MAX_ROWS:
        by_host = grouped({start.rank: start.host for start in starts})
        return Table(
            columns=("host", "ranks"),
            rows=[(host, rank_list(ranks)) for host, ranks in list(by_host.items())[:256]],
        )
    return Table(
        columns=("rank", "host", "local rank", "device", "cores", "process", "clock known to"),
        rows=[
            (
                str(start.rank),
                start.host,
                str(start.intra_rank),
                start.device,
                rank_list(start.cpus, max_parts=4).split(" ", 1)[1] if start.cpus else "",
                str(start.pid),
                duration(float(rank.clock.error_s.max())) if rank.clock.is_known else "",
            )
            for rank, start in zip(summary.run.ranks, starts, strict=True)
        ],
    )
