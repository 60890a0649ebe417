"""Draw speed as a share of no-exchange.

`docs/figures/exchange.png` has all sides and settings, and `start.png`, the figure of the README
and of the first page, some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from record import Bar

from exchange.exclusions import NOT_COUNTED
from exchange.table import LINES

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "exchange.png"
START = FIGURE.with_name("start.png")
START_LINE = "2h-100mbit-lossy"
START_SIDES = {
    "ddp": "DistributedDataParallel",
    "ddp fp16": "DistributedDataParallel, 16 bits",
    "every step": "torchmn",
    "every step int8": "torchmn, 8 bits",
    "every step 1bit": "torchmn, 1 bit",
}


def draw(bars: Sequence[Bar]) -> Path | None:
    """One panel per line of the table; peers are orange, what does not count is pale.

    None: there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _panels(bars)
    if not panels:
        return None
    if START_LINE in panels:
        _draw_start(pyplot, panels[START_LINE])
    heights = [max(1.2, 0.28 * len(sides)) for sides in panels.values()]
    num_rows = (len(panels) + 1) // 2
    figure, grid = pyplot.subplots(
        num_rows,
        2,
        figsize=(13, sum(max(heights[i : i + 2]) + 0.8 for i in range(0, len(heights), 2))),
        height_ratios=[max(heights[i : i + 2]) for i in range(0, len(heights), 2)],
        squeeze=False,
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, sides) in zip(grid.flat, panels.items(), strict=False):
        _draw_bars(axes, sides)
        axes.set_title(_title(name), fontsize=9)
    what = "speed, % of training without exchange (median, 95 % interval)"
    figure.supxlabel(f"{what}; * {NOT_COUNTED}", fontsize=9)
    figure.tight_layout()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=100)
    return FIGURE


def _panels(bars: Sequence[Bar]) -> dict[str, dict[str, Bar]]:
    """The shares of the baseline, by line and side."""
    panels: dict[str, dict[str, Bar]] = {}
    for bar in bars:
        line, _, rest = bar.bar.partition(": ")
        side, mark, _ = rest.partition(", share of ")
        if mark:
            panels.setdefault(line, {})[side] = bar
    return panels


def _draw_start(pyplot: Any, sides: Mapping[str, Bar]) -> None:
    """Of one line the sides that count, by names for readers who know none of ours."""
    shown = {name: sides[side] for side, name in START_SIDES.items() if side in sides}
    shown = {name: bar for name, bar in shown.items() if NOT_COUNTED not in bar.bar}
    figure, axes = pyplot.subplots(figsize=(8, 2.4), layout="constrained")
    _draw_bars(axes, shown)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("speed over 100 Mb/s, % of training without exchange")
    figure.savefig(START, dpi=110)


def _draw_bars(axes: Any, sides: Mapping[str, Bar]) -> None:
    values = [100 * bar.value for bar in sides.values()]
    errors = [
        [100 * (bar.value - bar.interval[0]) for bar in sides.values() if bar.interval],
        [100 * (bar.interval[1] - bar.value) for bar in sides.values() if bar.interval],
    ]
    colours = [_colour(side, bar) for side, bar in sides.items()]
    labels = [f"{side} *" if NOT_COUNTED in bar.bar else side for side, bar in sides.items()]
    axes.barh(labels, values, xerr=errors, color=colours)
    axes.axvline(100, color="grey", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlim(0, 112)
    axes.tick_params(labelsize=8)


def _colour(side: str, bar: Bar) -> str:
    if NOT_COUNTED in bar.bar:
        return "lightsteelblue"
    if side.startswith(
        ("ddp", "DistributedDataParallel", "horovod", "post-local", "torchft", "CNTK")
    ):
        return "tab:orange"
    return "silver" if "no-exchange" in side else "tab:blue"


def _title(name: str) -> str:
    line = LINES[name]
    each = f" x {line.workers_per_host} workers" if line.workers_per_host > 1 else ""
    rate = (line.rate or "shared memory").replace("gbit", " Gb/s").replace("mbit", " Mb/s")
    return f"{line.num_hosts} host{'s' * (line.num_hosts > 1)}{each}, {rate}"
