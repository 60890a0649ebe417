"""Draw `docs/figures/accuracy.png`: loss curves on CIFAR, and what each side loses or gains."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from accuracy.bars import interval_of, pairs_of
from accuracy.runs import Key, Run
from accuracy.sides import BASELINE
from accuracy.tasks import TASKS

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "accuracy.png"
CURVES = (
    BASELINE,
    *("every step 1bit", "double buffering", "block momentum int8, overlapped"),
    *("DiLoCo int8, overlapped", "parameter server"),
)


def draw(runs: Mapping[Key, Run]) -> Path:
    """Means over seeds; bars are 95 % intervals of the mean difference, paired by seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    task = TASKS["cifar"]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 5.5), gridspec_kw={"width_ratios": [1, 1.1]}
    )
    for name in CURVES:
        curves = [
            r.curve for r in runs.values() if (r.task, r.side) == (task.name, name) and r.curve
        ]
        if curves:
            mean = [statistics.mean(column) for column in zip(*curves, strict=True)]
            steps = [task.curve_steps * (i + 0.5) for i in range(len(mean))]
            left.plot(steps, mean, label=name, linewidth=2 if name == BASELINE else 1)
    left.set_xlabel("step of 64 images")
    left.set_ylabel("training loss, CIFAR-10 subset")
    if left.lines:
        left.legend(fontsize=8)
    labels, places = [], []
    for name in task.sides:
        pairs = pairs_of(task, name, runs)
        if name == BASELINE or not pairs.points:
            continue
        mean = statistics.mean(pairs.points)
        low, high = interval_of(pairs.points) or (mean, mean)
        place = len(labels)
        right.errorbar(
            mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color="tab:blue", capsize=3
        )
        labels.append(name)
        places.append(place)
    right.axvline(0, color="grey", linewidth=1)
    right.set_yticks(places, labels, fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("points of accuracy beside synchronous float32, CIFAR-10 subset")
    figure.tight_layout()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=110)
    pyplot.close(figure)
    return FIGURE
