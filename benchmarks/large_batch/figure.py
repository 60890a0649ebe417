"""Draw `docs/figures/large_batch.png`: accuracy by batch, loss curves, and the noise scale."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accuracy.bars import interval_of
from accuracy.runs import Key

from large_batch.bars import differences
from large_batch.prediction import efficiencies, predicted_batch
from large_batch.runs import NUM_POINTS, LargeRun
from large_batch.sides import BASE, Side
from large_batch.tasks import BASE_BATCH, FACTORS, TASKS, Task

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "large_batch.png"
COLOURS = {
    "plain": "tab:red",
    "linear": "tab:orange",
    "warm-up": "tab:blue",
    "LARS": "tab:green",
    "growth": "tab:purple",
    "ghosts of 32": "tab:brown",
    "one batch norm": "grey",
}


def draw(runs: Mapping[Key, LargeRun]) -> Path:
    """A row for each task. Means over seeds; bars are 95 % intervals, paired by seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(TASKS), 3, figsize=(12, 3.4 * len(TASKS)))
    for task, axes in zip(TASKS.values(), rows, strict=True):
        _accuracies(axes[0], task, runs)
        _curves(axes[1], task, runs)
        _efficiencies(axes[2], task, runs)
    entries = {}  # of any task: one that has not run has none
    for axes in rows[:, 0]:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    if entries:
        figure.legend(entries.values(), entries, fontsize=8, ncols=len(entries), loc="lower left")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=110)
    pyplot.close(figure)
    return FIGURE


def _accuracies(axes: Any, task: Task, runs: Mapping[Key, LargeRun]) -> None:
    lowest = 0.0
    for place, (recipe, colour) in enumerate(COLOURS.items()):
        for index, factor in enumerate(FACTORS):
            found = differences(task, Side(factor=factor, recipe=recipe), BASE, runs)  # type: ignore[arg-type]
            if not found:
                continue
            mean = statistics.mean(found)
            low, high = interval_of(found) or (mean, mean)
            label = recipe if factor == FACTORS[1] else None
            axes.errorbar(index + 0.12 * (place - 3), mean, yerr=[[mean - low], [high - mean]],
                          fmt="o", color=colour, capsize=2, markersize=4, label=label)  # fmt: skip
            lowest = min(lowest, mean)
    axes.axhline(0, color="black", linewidth=1)
    axes.set_xticks(range(len(FACTORS)), [f"{f} x = {f * BASE_BATCH}" for f in FACTORS])
    axes.set_yscale("symlog", linthresh=1)  # a recipe that diverges loses ten times the others
    axes.set_ylim(max(lowest * 1.5, -100) - 1, 3.0)
    ticks = [tick for tick in (-50, -20, -10, -5, -2, -1, 0, 1, 2) if tick >= axes.get_ylim()[0]]
    axes.set_yticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    axes.set_ylabel(f"{task.name}: points beside batch {BASE_BATCH}")


def _curves(axes: Any, task: Task, runs: Mapping[Key, LargeRun]) -> None:
    sides = [(BASE, "black"), *((Side(factor=16, recipe=r), c) for r, c in COLOURS.items())]  # type: ignore[arg-type]
    for side, colour in sides:
        own = [run.curve for key, run in runs.items() if key[:2] == (task.name, side.name)]
        whole = [curve for curve in own if len(curve) == NUM_POINTS]
        if whole:
            mean = [statistics.mean(column) for column in zip(*whole, strict=True)]
            epochs = [task.epochs * (i + 0.5) / NUM_POINTS for i in range(NUM_POINTS)]
            width = 1.5 if side is BASE else 1
            axes.plot(epochs, mean, color=colour, linewidth=width)
            axes.set_ylim(min([*mean, axes.get_ylim()[0]]) * 0.9, mean[1] * 1.1)
    axes.set_xlabel(f"epochs; black: batch {BASE_BATCH}, colours: {16 * BASE_BATCH}")
    axes.set_ylabel("training loss")


def _efficiencies(axes: Any, task: Task, runs: Mapping[Key, LargeRun]) -> None:
    found = efficiencies(task, runs)
    critical = predicted_batch(task, runs)
    if critical is not None:
        batches = [BASE_BATCH * 2 ** (i / 4) for i in range(25)]
        values = [(1 + BASE_BATCH / critical) / (1 + batch / critical) for batch in batches]
        axes.plot(batches, values, color="tab:cyan", label="predicted by the noise scale")
        axes.axvline(critical, color="tab:cyan", linestyle=":", label=f"{critical:.0f} samples")
    measured = [(BASE_BATCH * e.factor, e.measured) for e in found if e.measured is not None]
    axes.plot(*zip((BASE_BATCH, 1.0), *measured, strict=True), "ko", label="measured")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, max([1.2, *(1.1 * value for _, value in measured)]))
    axes.set_xlabel("batch in samples")
    axes.set_ylabel("efficiency of a sample")
    axes.legend(fontsize=7)
