"""The charts of the page, as data for plotly.js, each with a table that shows the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from torchmn.observe.report.scaling import Scaling
from torchmn.observe.report.summary import Summary, bits, duration, grouped, megabytes, rank_list
from torchmn.record.records import PHASES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MAX_BARS = 48
MAX_LINES = 24
MAX_BINS = 240
MAX_HEATMAP_ROWS = 160
MAX_POINTS = 600
MAX_TABLE_ROWS = 64
MAX_VALUES = 6

PHASE_COLORS = {
    "data": "#e69f00",
    "copy": "#f0c66b",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "exchange": "#d55e00",
    "encode": "#cc79a7",
    "decode": "#e3b4cf",
    "optimizer": "#009e73",
    "evaluation": "#7f7f7f",
    "checkpoint": "#b0a46c",
    "other": "#c7c7c7",
}
"""Of the palette of Okabe and Ito, which people with any vision of colors tell apart."""
MEASURED, IDEAL, FITTED = "#0072b2", "#7f7f7f", "#d55e00"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text, the first column as the heads of rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: what it shows, plotly's traces and layout, and the table beside it."""

    title: str
    description: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    table: Table
    height: int = 320
    is_small: bool = field(default=False)
    """Whether several fit beside each other."""


def scaling_charts(scaling: Scaling) -> Iterator[Chart]:
    """Throughput, speed-up and efficiency over the number of ranks."""
    points = scaling.points
    sizes = [point.num_ranks for point in points]
    curve = np.linspace(sizes[0], sizes[-1], 60).tolist()
    per_rank = points[0].rate / points[0].speedup
    table = Table(
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
            for point in points
        ],
    )
    kinds = (
        (f"Throughput ({scaling.unit})", per_rank, False, [p.rate for p in points], ""),
        ("Speed-up", 1.0, False, [p.speedup for p in points], ""),
        ("Efficiency", 1.0, True, [p.efficiency for p in points], ".0%"),
    )
    for title, scale, is_per_rank, measured, tick_format in kinds:

        def line(values: list[float], name: str, color: str, dash: str) -> dict[str, Any]:
            return {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": _rounded(curve),
                "y": _rounded(values),
                "line": {"color": color, "dash": dash},
                "hoverinfo": "skip",
            }

        divisors = curve if is_per_rank else [1.0] * len(curve)
        ideal = [scale * n / d for n, d in zip(curve, divisors, strict=True)]
        fitted = [scale * scaling.amdahl(n) / d for n, d in zip(curve, divisors, strict=True)]
        traces = [line(ideal, "ideal", IDEAL, "dash")]
        if scaling.serial_share is not None:
            name = f"Amdahl, serial part {scaling.serial_share:.1%}"
            traces.append(line(fitted, name, FITTED, "dot"))
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "measured",
                "x": sizes,
                "y": _rounded(measured),
                "marker": {"color": MEASURED, "size": 10},
            }
        )
        yield Chart(
            title=title,
            description=f"{title} over the number of ranks: "
            + ", ".join(
                f"{size} ranks {value:{tick_format or ',.2f'}}"
                for size, value in zip(sizes, measured, strict=True)
            ),
            traces=traces,
            layout={
                "xaxis": {"title": {"text": "ranks"}, "tickvals": sorted(set(sizes))},
                "yaxis": {"rangemode": "tozero", "tickformat": tick_format},
            },
            table=table,
            is_small=True,
        )


def run_charts(summary: Summary) -> Iterator[Chart]:
    """Where the time goes, who is late, links, values and memory."""
    yield _phases_by_rank(summary)
    if len(summary.step) > 1:
        yield _phases_over_time(summary)
    if len(summary.ranks) > 1:
        yield _lateness(summary)
    if summary.links:
        yield _links(summary)
    yield from _values(summary)
    memory = _memory(summary)
    if memory is not None:
        yield memory


def _phases_by_rank(summary: Summary) -> Chart:
    names, means, what = _bars(summary)
    totals = means.sum(1)
    shown = [index for index in range(len(PHASES)) if means[:, index].any()]
    traces = [
        {
            "type": "bar",
            "name": PHASES[index],
            "x": names,
            "y": _rounded(1e3 * means[:, index]),
            "marker": {"color": PHASE_COLORS[PHASES[index]]},
            "hovertemplate": f"%{{x}}<br>{PHASES[index]} %{{y:.2f}} ms<extra></extra>",
        }
        for index in shown
    ]
    longest = int(totals.argmax())
    return Chart(
        title=f"Where the time of a step goes, by {what}",
        description=f"Mean milliseconds of each phase, by {what}. Shares over all: "
        + ", ".join(
            f"{PHASES[index]} {means[:, index].mean() / totals.mean():.0%}" for index in shown
        )
        + f". The longest step is that of {names[longest]}.",
        traces=traces,
        layout={
            "barmode": "stack",
            "xaxis": {"type": "category", "automargin": True},
            "yaxis": {"title": {"text": "ms"}, "automargin": True},
        },
        table=Table(
            columns=(what, "step", *(PHASES[index] for index in shown)),
            rows=[
                (names[row], duration(totals[row]), *(duration(means[row, i]) for i in shown))
                for row in range(min(len(names), MAX_TABLE_ROWS))
            ],
        ),
    )


def _bars(summary: Summary) -> tuple[list[str], Floats, str]:
    """Names and phases of each bar: ranks, hosts, or the ranks that are late the most."""
    means = summary.mean_phases
    if len(summary.ranks) <= MAX_BARS:
        return [f"rank {rank.start.rank}" for rank in summary.ranks], means, "rank"
    if len(summary.hosts) <= MAX_BARS:
        by_host = [means[indices].mean(0) for indices in summary.hosts.values()]
        return list(summary.hosts), np.array(by_host), "host"
    chosen = np.sort(np.argsort(summary.own.mean(0))[::-1][:MAX_BARS])
    names = [f"rank {summary.ranks[index].start.rank}" for index in chosen]
    return names, means[chosen], f"rank, the {MAX_BARS} that compute longest"


def _phases_over_time(summary: Summary) -> Chart:
    bins = _bins(len(summary.step), MAX_BINS)
    over_ranks = summary.phases.mean(1)
    values = np.array([over_ranks[part].mean(0) for part in bins])
    steps = [int(summary.step[part][0]) for part in bins]
    shown = [index for index in range(len(PHASES)) if values[:, index].any()]
    totals = values.sum(1)
    parts = np.array_split(np.arange(len(bins)), min(len(bins), 12))
    return Chart(
        title="Where the time of a step goes, over the run",
        description="Mean milliseconds of each phase over all ranks, by step. The mean step lasts "
        f"{duration(float(totals[0]))} at first and {duration(float(totals[-1]))} at last, "
        f"{duration(float(totals.max()))} at most around step {steps[int(totals.argmax())]:,}.",
        traces=[
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "phases",
                "name": PHASES[index],
                "x": steps,
                "y": _rounded(1e3 * values[:, index]),
                "line": {"width": 0},
                "fillcolor": PHASE_COLORS[PHASES[index]],
            }
            for index in shown
        ],
        layout={
            "hovermode": "x unified",
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"title": {"text": "ms"}, "automargin": True},
        },
        table=Table(
            columns=("from step", "mean step", *(PHASES[index] for index in shown)),
            rows=[
                (
                    f"{steps[part[0]]:,}",
                    duration(float(totals[part].mean())),
                    *(duration(float(values[part, index].mean())) for index in shown),
                )
                for part in parts
            ],
        ),
    )


def _lateness(summary: Summary) -> Chart:
    late = 1e3 * summary.lateness_s
    columns = _bins(len(late), MAX_BINS)
    by_step = np.array([late[part].mean(0) for part in columns])  # (bins, ranks)
    rows = _bins(len(summary.ranks), MAX_HEATMAP_ROWS)
    picture = []
    for part in rows:  # of a group of ranks the one that is late the most
        group = by_step[:, part]
        picture.append(group[np.arange(len(group)), np.abs(group).argmax(1)])
    numbers = [[summary.ranks[index].start.rank for index in part] for part in rows]
    limit = max(float(np.percentile(np.abs(by_step), 99.5)), 0.05)
    means, spread = late[summary.num_warmup :].mean(0), late[summary.num_warmup :].max(0)
    order = np.argsort(means)[::-1]
    worst = int(order[0])
    return Chart(
        title="Which rank is late, and when",
        description="How many milliseconds later than the median rank each was ready for the "
        f"exchange, by step. {rank_list([summary.ranks[worst].start.rank])} is late the most, by "
        f"{means[worst]:.2f} ms on average.",
        traces=[
            {
                "type": "heatmap",
                "x": [int(summary.step[part][0]) for part in columns],
                "y": [rank_list(ranks).split(" ", 1)[1] for ranks in numbers],
                "z": [_rounded(row) for row in picture],
                "zmin": -_rounded([limit])[0],
                "zmax": _rounded([limit])[0],
                "colorscale": [[0, "#2166ac"], [0.5, "#f7f7f7"], [1, "#b2182b"]],
                "colorbar": {"title": {"text": "ms late"}, "thickness": 12},
                "hovertemplate": "rank %{y}, step %{x}<br>%{z:.2f} ms<extra></extra>",
            }
        ],
        layout={
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {
                "title": {"text": "rank"},
                "type": "category",
                "autorange": "reversed",
                "automargin": True,
            },
        },
        height=max(220, min(640, 120 + 22 * len(rows))),
        table=Table(
            columns=("rank", "host", "late on average", "late at most", "own time of a step"),
            rows=[
                (
                    str(summary.ranks[index].start.rank),
                    summary.host(int(index)),
                    f"{means[index]:.2f} ms",
                    f"{spread[index]:.2f} ms",
                    duration(float(summary.own[:, index].mean())),
                )
                for index in order[:MAX_TABLE_ROWS]
            ],
        ),
    )


def _links(summary: Summary) -> Chart:
    links = sorted(summary.links, key=lambda link: -link.nbytes_per_step)[:MAX_BARS]
    names = [f"{link.source} to {link.target}" for link in links]
    measured = [8e-9 * link.bytes_per_s for link in links]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "measured",
            "y": names,
            "x": _rounded(measured),
            "marker": {"color": MEASURED},
        }
    ]
    nominal = [link.nominal_bytes_per_s for link in links]
    if any(rate is not None for rate in nominal):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "nominal",
                "y": names,
                "x": [None if rate is None else _rounded([8e-9 * rate])[0] for rate in nominal],
                "marker": {"symbol": "line-ns-open", "size": 16, "color": FITTED},
            }
        )
    return Chart(
        title="Links between hosts",
        description="Gigabits per second from host to host while gradients are exchanged: "
        + ", ".join(f"{n} {r:.2f}" for n, r in zip(names[:8], measured, strict=False)),
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "Gb/s while busy"}, "rangemode": "tozero"},
            "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
        },
        height=max(200, 110 + 26 * len(links)),
        table=Table(
            columns=("link", "bytes per step", "rate while busy", "nominal rate"),
            rows=[
                (
                    name,
                    megabytes(link.nbytes_per_step),
                    bits(link.bytes_per_s),
                    "unknown"
                    if link.nominal_bytes_per_s is None
                    else bits(link.nominal_bytes_per_s),
                )
                for name, link in zip(names, links, strict=True)
            ],
        ),
    )


def _values(summary: Summary) -> Iterator[Chart]:
    """What the script reports, the mean over the ranks that report it."""
    names = list(dict.fromkeys(name for rank in summary.ranks for name in rank.values))
    first = summary.ranks[0].steps
    samples = summary.column("samples").mean() * summary.run.size
    for name in names[:MAX_VALUES]:
        pairs = [rank.values[name] for rank in summary.ranks if name in rank.values]
        steps = np.unique(np.concatenate([each for each, _ in pairs]))
        sums, counts = np.zeros(len(steps)), np.zeros(len(steps))
        for each, values in pairs:
            rows = np.searchsorted(steps, each)
            np.add.at(sums, rows, values)
            np.add.at(counts, rows, 1)
        means = sums / counts
        chosen = np.array([part[-1] for part in _bins(len(steps), MAX_POINTS)])
        steps, means = steps[chosen], means[chosen]
        if not len(steps):
            continue
        seconds = np.interp(steps, first.step, first.at_s - summary.ranks[0].start.at_s)
        axes = [("step", steps.astype(np.float64)), ("seconds", seconds)]
        if np.isfinite(samples):
            axes.insert(1, ("samples", (steps + 1.0) * samples))
        finite = [None if not np.isfinite(value) else value for value in means.tolist()]
        parts = [part[-1] for part in _bins(len(steps), 12)]
        yield Chart(
            title=name,
            description=f"{name}, mean over ranks: {means[0]:.4g} at step {steps[0]:,}, "
            f"{means[-1]:.4g} at step {steps[-1]:,}.",
            traces=[
                {
                    "type": "scatter",
                    "mode": "lines" if len(steps) > 1 else "markers",
                    "x": _rounded(axes[0][1]),
                    "y": [None if value is None else _rounded([value])[0] for value in finite],
                    "line": {"color": MEASURED},
                }
            ],
            layout={
                "xaxis": {"title": {"text": "step"}},
                "yaxis": {"automargin": True},
                "updatemenus": [
                    {
                        "type": "buttons",
                        "direction": "right",
                        "x": 0,
                        "xanchor": "left",
                        "y": 1.18,
                        "pad": {"t": 0},
                        "buttons": [
                            {
                                "label": label,
                                "method": "update",
                                "args": [{"x": [_rounded(x)]}, {"xaxis.title.text": label}],
                            }
                            for label, x in axes
                        ],
                    }
                ],
            },
            table=Table(
                columns=(*(label for label, _ in axes), name),
                rows=[
                    (*(f"{x[index]:,.6g}" for _, x in axes), f"{means[index]:.5g}")
                    for index in parts
                ],
            ),
            is_small=True,
        )


def _memory(summary: Summary) -> Chart | None:
    ranks = [rank for rank in summary.ranks if len(rank.memory[0])]
    if not ranks:
        return None
    ranks = sorted(ranks, key=lambda rank: -rank.memory[1].max())[:MAX_LINES]
    ranks = sorted(ranks, key=lambda rank: rank.start.rank)
    traces, rows = [], []
    for rank in ranks:
        at_s, process, device = rank.memory
        chosen = np.array([part[-1] for part in _bins(len(at_s), MAX_POINTS // 4)])
        at_s = at_s[chosen] - rank.start.at_s
        for kind, nbytes, dash in (("", process, "solid"), (", device", device, "dot")):
            if not nbytes.any():
                continue
            used = nbytes[chosen] / 1e9
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": f"rank {rank.start.rank}{kind}",
                    "x": _rounded(at_s),
                    "y": _rounded(used),
                    "line": {"dash": dash},
                }
            )
            rows.append(
                (
                    f"{rank.start.rank}{kind}",
                    rank.start.host,
                    f"{used[0]:.2f} GB",
                    f"{used.max():.2f} GB",
                    f"{used[-1]:.2f} GB",
                )
            )
    return Chart(
        title="Memory",
        description="Gigabytes over the run, by rank; the most is "
        f"{max(rank.memory[1].max() for rank in ranks) / 1e9:.2f} GB.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "seconds"}},
            "yaxis": {"title": {"text": "GB"}, "rangemode": "tozero", "automargin": True},
        },
        table=Table(columns=("rank", "host", "at first", "at most", "at last"), rows=rows),
        is_small=True,
    )


def placement_table(summary: Summary) -> Table:
    """Which rank is where; ranks of one host with consecutive numbers in one row if many."""
    starts = [rank.start for rank in summary.run.ranks]
    if len(starts) > MAX_TABLE_ROWS:
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


def slow_steps_table(summary: Summary) -> Table:
    """The slowest steps and their causes."""
    return Table(
        columns=("step", "lasted", "because"),
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


def _bins(count: int, limit: int) -> list[NDArray[np.int64]]:
    return [part for part in np.array_split(np.arange(count), min(count, limit)) if len(part)]


def _rounded(values: Any) -> list[float]:
    """To five digits: the page stays small."""
    return [float(f"{value:.5g}") for value in np.asarray(values, dtype=np.float64).tolist()]
