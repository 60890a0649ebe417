"""Make the charts of the page, each with a table of the same numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchmn.observe.read.recorded_run import Floats, Integers
from torchmn.observe.report.drawing import Drawing, axis_of, axis_of_names
from torchmn.observe.report.summary import Summary, duration, number_list, rank_list
from torchmn.observe.report.tables import MAX_ROWS, Table
from torchmn.record.records import PHASES

MAX_BARS = 48
MAX_BINS = 120
MAX_HEATMAP_ROWS, MAX_HEATMAP_CELLS = 64, 1920
MAX_POINTS = 300
MAX_TITLES = 100  # of a line: what the mouse can show
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
LINE_COLOR = "#0072b2"
# Early ranks are blue, late ones red, in between they are grey.
EARLY, MIDDLE, LATE = (33, 102, 172), (247, 247, 247), (178, 24, 43)
NUM_SHADES = 8


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: its text, its drawing as HTML, and the table beside it."""

    title: str
    description: str
    drawing: str
    table: Table
    is_small: bool = False  # whether several fit beside each other


def run_charts(summary: Summary) -> Iterator[Chart]:
    """Chart the phases of a run, the lateness of its ranks, and what the script reports."""
    yield _phases_by_rank(summary)
    if len(summary.step) > 1:
        yield _phases_over_time(summary)
    if len(summary.ranks) > 1:
        yield _lateness(summary)
    yield from _values(summary)


def _phases_by_rank(summary: Summary) -> Chart:
    names, means, what = _bars(summary)
    totals = means.sum(1)
    shown = [index for index in range(len(PHASES)) if means[:, index].any()]
    shares = [f"{PHASES[i]} {means[:, i].mean() / totals.mean():.0%}" for i in shown]
    tops = 1e3 * np.cumsum(means, axis=1)
    short = [name.removeprefix("rank ") for name in names]
    title = "rank" if short != names else ""
    drawing = Drawing(axis_of_names(short, title), axis_of([0, *tops[:, -1]], "ms"))
    for index in shown:
        bars = [
            (
                (row + 0.1, row + 0.9, tops[row, index] - 1e3 * seconds, tops[row, index]),
                f"{names[row]}: {PHASES[index]} {1e3 * seconds:.2f} ms",
            )
            for row, seconds in enumerate(means[:, index])
        ]
        drawing.bars(bars, PHASE_COLORS[PHASES[index]])
        drawing.legend(PHASES[index], PHASE_COLORS[PHASES[index]])
    return Chart(
        title=f"Where the time of a step goes, by {what}",
        description=f"Mean milliseconds of each phase, by {what}. Shares over all: "
        f"{', '.join(shares)}. The longest step is that of {names[int(totals.argmax())]}.",
        drawing=drawing.html(),
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
    tops = 1e3 * np.cumsum(values, axis=1)
    drawing = Drawing(axis_of(steps, "step"), axis_of([0, *tops[:, -1]], "ms"))
    for index in shown:
        color = PHASE_COLORS[PHASES[index]]
        lower = (tops[:, index] - 1e3 * values[:, index]).tolist()
        drawing.area(steps, lower, tops[:, index].tolist(), color)
        drawing.legend(PHASES[index], color)
    titles = [
        "\n".join(
            [
                f"step {step:,}: {duration(float(row.sum()))}",
                *(f"{PHASES[index]} {1e3 * row[index]:.2f} ms" for index in shown),
            ]
        )
        for step, row in zip(steps, values, strict=True)
    ]
    drawing.columns(steps, titles)
    return Chart(
        title="Where the time of a step goes, over the run",
        description="Mean milliseconds of each phase over all ranks, by step. The mean step lasts "
        f"{duration(float(totals[0]))} at first and {duration(float(totals[-1]))} at last, "
        f"{duration(float(totals.max()))} at most around step {steps[int(totals.argmax())]:,}.",
        drawing=drawing.html(),
        table=_phases_table("from step", [f"{steps[part[0]]:,}" for part in parts], means, shown),
    )


def _lateness(summary: Summary) -> Chart:
    late = 1e3 * summary.lateness_s
    rows = _bins(len(summary.ranks), MAX_HEATMAP_ROWS)
    columns = _bins(len(late), min(MAX_BINS, MAX_HEATMAP_CELLS // len(rows)))
    by_step = np.array([late[part].mean(0) for part in columns])  # (bins, ranks)
    picture = []
    for part in rows:  # of a group of ranks the one that is late the most
        group = by_step[:, part]
        picture.append(group[np.arange(len(group)), np.abs(group).argmax(1)])
    numbers = [[summary.ranks[index].start.rank for index in part] for part in rows]
    # Rare steps that last far longer, as at the end of an epoch, would leave the others colorless.
    limit = max(float(np.percentile(np.abs(by_step), 95)), 0.05)
    means, spread = late[summary.num_warmup :].mean(0), late[summary.num_warmup :].max(0)
    order = np.argsort(means)[::-1]
    worst = int(order[0])
    names = [number_list(ranks) for ranks in numbers]
    drawing = Drawing(
        axis_of([summary.step[0], summary.step[-1] + 1], "step"),
        axis_of_names(names, "rank", is_reversed=True),
        height=max(100, min(520, 24 * len(rows))),
    )
    drawing.cells(
        [int(summary.step[part[0]]) for part in columns],
        [[shade(value / limit) for value in row.tolist()] for row in picture],
        [
            f"rank {name}: {row.mean():.2f} ms late on average, {row.max():.2f} ms at most"
            for name, row in zip(names, picture, strict=True)
        ],
    )
    shades = ", ".join(shade(share) for share in (-1.0, 0.0, 1.0))
    most = duration(limit / 1e3)
    drawing.legend(f"{most} early to {most} late", f"linear-gradient(90deg, {shades})")
    return Chart(
        title="Which rank is late, and when",
        description="How many milliseconds later than the median rank each was ready for the "
        f"exchange, by step. {rank_list([summary.ranks[worst].start.rank])} is late the most, by "
        f"{means[worst]:.2f} ms on average.",
        drawing=drawing.html(),
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
        drawing = Drawing(axis_of(steps, "step"), axis_of(means))
        drawing.line(steps, means, LINE_COLOR)
        titled = [part[-1] for part in _bins(len(steps), MAX_TITLES)]
        titles = [
            ", ".join(f"{label} {x[row]:,.6g}" for label, x in axes) + f": {means[row]:.5g}"
            for row in titled
        ]
        drawing.columns(steps[titled].tolist(), titles)
        yield Chart(
            title=name,
            description=f"{name}, mean over ranks: {means[0]:.4g} at step {steps[0]:,}, "
            f"{means[-1]:.4g} at step {steps[-1]:,}.",
            drawing=drawing.html(),
            table=Table(
                columns=(*(label for label, _ in axes), name),
                rows=[
                    (*(f"{x[part[-1]]:,.6g}" for _, x in axes), f"{means[part[-1]]:.5g}")
                    for part in _bins(len(steps), 12)
                ],
            ),
            is_small=True,
        )


def _bins(count: int, limit: int) -> list[Integers]:
    """Divide indices into parts of equal length, at most ``limit``; only the last may be shorter.

    With parts of two lengths, a peak would be half as high in the longer ones.
    """
    return np.split(np.arange(count), range(-(-count // limit), count, -(-count // limit)))


def shade(share: float) -> str:
    """Return the color of a lateness, from -1 to 1 of the most that has a shade of its own."""
    level = round(NUM_SHADES * max(-1.0, min(1.0, share))) / NUM_SHADES
    end = LATE if level > 0 else EARLY
    mixed = [round(m + abs(level) * (e - m)) for m, e in zip(MIDDLE, end, strict=True)]
    return f"#{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}"
