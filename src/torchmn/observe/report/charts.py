"""Make the charts of the page, as data for plotly.js, each with a table of the same numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchmn.observe.read.recorded_run import Floats, Integers
from torchmn.observe.report.summary import Summary, bits, duration, rank_list
from torchmn.observe.report.tables import MAX_ROWS, Scaling, Table, links_table, scaling_table
from torchmn.record.records import PHASES

MAX_BARS = 48
MAX_LINES = 24
MAX_BINS = 240
MAX_HEATMAP_ROWS = 160
MAX_POINTS = 600
MAX_VALUES = 6

# Of the palette of Okabe and Ito, which people with any vision of colors tell apart.
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
MEASURED, IDEAL, FITTED = "#0072b2", "#7f7f7f", "#d55e00"

Trace = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: its text, plotly's traces and layout, and the table beside it."""

    title: str
    description: str
    traces: Sequence[Trace]
    layout: dict[str, Any]
    table: Table
    height: int = 320
    is_small: bool = False  # whether several fit beside each other


def _lines(name: str, x: Any, y: Any, **style: Any) -> Trace:
    """Return plotly's trace of a line through points, to which ``style`` adds options."""
    points = {"x": _rounded(x), "y": _rounded(y)}
    return {"type": "scatter", "mode": "lines", "name": name, **points, **style}


def _axis(title: str = "", **style: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, **style}


def scaling_charts(scaling: Scaling) -> Iterator[Chart]:
    """Chart throughput, speed-up and efficiency over the number of ranks."""
    points = scaling.points
    sizes = [point.num_ranks for point in points]
    curve = np.linspace(sizes[0], sizes[-1], 60)
    amdahl = np.array([scaling.amdahl(size) for size in curve])
    per_rank = points[0].rate / points[0].speedup
    for title, scale, measured, tick_format in (
        (f"Throughput ({scaling.unit})", per_rank, [p.rate for p in points], ""),
        ("Speed-up", 1.0, [p.speedup for p in points], ""),
        ("Efficiency", 1 / curve, [p.efficiency for p in points], ".0%"),
    ):
        dash = {"color": IDEAL, "dash": "dash"}
        traces = [_lines("ideal", curve, scale * curve, line=dash, hoverinfo="skip")]
        if scaling.serial_share is not None:
            name = f"Amdahl, serial part {scaling.serial_share:.1%}"
            dots = {"color": FITTED, "dash": "dot"}
            traces.append(_lines(name, curve, scale * amdahl, line=dots, hoverinfo="skip"))
        marker = {"color": MEASURED, "size": 10}
        traces.append(_lines("measured", sizes, measured, mode="markers", marker=marker))
        values = zip(sizes, measured, strict=True)
        yield Chart(
            title=title,
            description=f"{title} over the number of ranks: "
            + ", ".join(f"{n} ranks {value:{tick_format or ',.2f'}}" for n, value in values),
            traces=traces,
            layout={
                "xaxis": _axis("ranks", tickvals=sorted(set(sizes))),
                "yaxis": _axis(rangemode="tozero", tickformat=tick_format),
            },
            table=scaling_table(scaling),
            is_small=True,
        )


def run_charts(summary: Summary) -> Iterator[Chart]:
    """Chart the phases of a run, the lateness of ranks, links, values and memory."""
    yield _phases_by_rank(summary)
    if len(summary.step) > 1:
        yield _phases_over_time(summary)
    if len(summary.ranks) > 1:
        yield _lateness(summary)
    if summary.links:
        yield _links(summary)
    yield from _values(summary)
    if any(len(rank.memory[0]) for rank in summary.ranks):
        yield _memory(summary)


def _phases_by_rank(summary: Summary) -> Chart:
    names, means, what = _bars(summary)
    totals = means.sum(1)
    shown = [index for index in range(len(PHASES)) if means[:, index].any()]
    shares = [f"{PHASES[i]} {means[:, i].mean() / totals.mean():.0%}" for i in shown]
    return Chart(
        title=f"Where the time of a step goes, by {what}",
        description=f"Mean milliseconds of each phase, by {what}. Shares over all: "
        f"{', '.join(shares)}. The longest step is that of {names[int(totals.argmax())]}.",
        traces=[
            {
                "type": "bar",
                "name": PHASES[index],
                "x": names,
                "y": _rounded(1e3 * means[:, index]),
                "marker": {"color": PHASE_COLORS[PHASES[index]]},
                "hovertemplate": f"%{{x}}<br>{PHASES[index]} %{{y:.2f}} ms<extra></extra>",
            }
            for index in shown
        ],
        layout={"barmode": "stack", "xaxis": _axis(type="category"), "yaxis": _axis("ms")},
        table=_phases_table(what, names[:MAX_ROWS], means, shown),
    )


def _phases_table(head: str, names: Sequence[str], seconds: Floats, shown: list[int]) -> Table:
    """Make a table of the step and its phases, with a row for each name and row of ``seconds``."""
    return Table(
        columns=(head, "step", *(PHASES[index] for index in shown)),
        rows=[
            (name, *(duration(float(each)) for each in (row.sum(), *row[shown])))
            for name, row in zip(names, seconds, strict=False)
        ],
    )


def _bars(summary: Summary) -> tuple[list[str], Floats, str]:
    """Return names and phases of the bars: ranks, hosts, or the ranks that are latest."""
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
    parts = _bins(len(bins), 12)
    means = np.array([values[part].mean(0) for part in parts])
    return Chart(
        title="Where the time of a step goes, over the run",
        description="Mean milliseconds of each phase over all ranks, by step. The mean step lasts "
        f"{duration(float(totals[0]))} at first and {duration(float(totals[-1]))} at last, "
        f"{duration(float(totals.max()))} at most around step {steps[int(totals.argmax())]:,}.",
        traces=[
            _lines(
                PHASES[index],
                steps,
                1e3 * values[:, index],
                stackgroup="phases",
                line={"width": 0},
                fillcolor=PHASE_COLORS[PHASES[index]],
            )
            for index in shown
        ],
        layout={"hovermode": "x unified", "xaxis": _axis("step"), "yaxis": _axis("ms")},
        table=_phases_table("from step", [f"{steps[part[0]]:,}" for part in parts], means, shown),
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
            "xaxis": _axis("step"),
            "yaxis": _axis("rank", type="category", autorange="reversed"),
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
                for index in order[:MAX_ROWS]
            ],
        ),
    )


def _links(summary: Summary) -> Chart:
    links = summary.busiest_links[:MAX_BARS]
    names = [f"{link.source} to {link.target}" for link in links]
    measured = [8e-9 * link.bytes_per_s for link in links]
    known = [link for link in links if link.nominal_bytes_per_s]
    nominal = {
        "type": "scatter",
        "mode": "markers",
        "name": "nominal",
        "y": [f"{link.source} to {link.target}" for link in known],
        "x": _rounded([8e-9 * (link.nominal_bytes_per_s or 0.0) for link in known]),
        "marker": {"symbol": "line-ns-open", "size": 16, "color": FITTED},
    }
    bars: Trace = {"type": "bar", "orientation": "h", "name": "measured", "y": names}
    bars |= {"x": _rounded(measured), "marker": {"color": MEASURED}}
    shown = zip(names[:8], links, strict=False)
    return Chart(
        title="Links between hosts",
        description="Rates from host to host while gradients are exchanged: "
        + ", ".join(f"{n} {bits(each.bytes_per_s)}" for n, each in shown),
        traces=[bars, nominal] if known else [bars],
        layout={
            "xaxis": _axis("Gb/s while busy", rangemode="tozero"),
            "yaxis": _axis(type="category", autorange="reversed"),
        },
        height=max(200, 110 + 26 * len(links)),
        table=links_table(summary),
    )


def _values(summary: Summary) -> Iterator[Chart]:
    """Chart the values that the script reports, as the mean over the ranks that report them."""
    names = list(dict.fromkeys(name for rank in summary.ranks for name in rank.values))
    first = summary.ranks[0].steps
    samples = summary.column("samples").mean() * summary.run.size
    for name in names[:MAX_VALUES]:
        pairs = [rank.values[name] for rank in summary.ranks if name in rank.values]
        steps, rows = np.unique(np.concatenate([each for each, _ in pairs]), return_inverse=True)
        if not len(steps):
            continue
        sums = np.bincount(rows, weights=np.concatenate([values for _, values in pairs]))
        means = sums / np.bincount(rows)
        chosen = np.array([part[-1] for part in _bins(len(steps), MAX_POINTS)])
        steps, means = steps[chosen], means[chosen]
        seconds = np.interp(steps, first.step, first.at_s - summary.ranks[0].start.at_s)
        axes = [("step", steps.astype(np.float64)), ("seconds", seconds)]
        if np.isfinite(samples):
            axes.insert(1, ("samples", (steps + 1.0) * samples))
        buttons = [
            {
                "label": label,
                "method": "update",
                "args": [{"x": [_rounded(x)]}, {"xaxis.title.text": label}],
            }
            for label, x in axes
        ]
        place = {"x": 0, "xanchor": "left", "y": 1.18, "pad": {"t": 0}}
        menu = {"type": "buttons", "direction": "right", **place, "buttons": buttons}
        mode = "lines" if len(steps) > 1 else "markers"
        yield Chart(
            title=name,
            description=f"{name}, mean over ranks: {means[0]:.4g} at step {steps[0]:,}, "
            f"{means[-1]:.4g} at step {steps[-1]:,}.",
            traces=[_lines(name, steps, means, mode=mode, line={"color": MEASURED})],
            layout={"xaxis": _axis("step"), "yaxis": _axis(), "updatemenus": [menu]},
            table=Table(
                columns=(*(label for label, _ in axes), name),
                rows=[
                    (*(f"{x[part[-1]]:,.6g}" for _, x in axes), f"{means[part[-1]]:.5g}")
                    for part in _bins(len(steps), 12)
                ],
            ),
            is_small=True,
        )


def _memory(summary: Summary) -> Chart:
    ranks = [rank for rank in summary.ranks if len(rank.memory[0])]
    ranks = sorted(ranks, key=lambda rank: -rank.memory[1].max())[:MAX_LINES]
    traces, rows = [], []
    for rank in sorted(ranks, key=lambda rank: rank.start.rank):
        at_s, process, device = rank.memory
        chosen = np.array([part[-1] for part in _bins(len(at_s), MAX_POINTS // 4)])
        seconds = at_s[chosen] - rank.start.at_s
        for kind, nbytes, dash in (("", process, "solid"), (", device", device, "dot")):
            if not nbytes.any():
                continue
            used = nbytes[chosen] / 1e9
            name = f"{rank.start.rank}{kind}"
            traces.append(_lines(f"rank {name}", seconds, used, line={"dash": dash}))
            sizes = (f"{each:.2f} GB" for each in (used[0], used.max(), used[-1]))
            rows.append((name, rank.start.host, *sizes))
    return Chart(
        title="Memory",
        description="Gigabytes over the run, by rank; the most is "
        f"{max(rank.memory[1].max() for rank in ranks) / 1e9:.2f} GB.",
        traces=traces,
        layout={"xaxis": _axis("seconds"), "yaxis": _axis("GB", rangemode="tozero")},
        table=Table(columns=("rank", "host", "at first", "at most", "at last"), rows=rows),
        is_small=True,
    )


def _bins(count: int, limit: int) -> list[Integers]:
    return [part for part in np.array_split(np.arange(count), min(count, limit)) if len(part)]


def _rounded(values: Any) -> list[Any]:
    """Round to five digits, so that the page stays small; None for what is not finite."""
    numbers = np.asarray(values, dtype=np.float64).tolist()
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in numbers]
