"""Draw `docs/figures/vgg.png` from `out/vgg.json`: throughput of every side of `make bench-vgg`."""

from __future__ import annotations

import json
from pathlib import Path

from record import OUT

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "vgg.png"


def draw() -> Path:
    """Bars of throughput on 2 workers, with quartiles; DDP and one worker alone are marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    record = json.loads((OUT / "vgg.json").read_text())
    prefix = "backend auto: "
    sides = [b for b in record["bars"] if b["bar"].startswith(prefix) and b["unit"] == "images/s"]
    names = [b["bar"].removeprefix(prefix) for b in sides]
    labels = ["no exchange" if name == "alone" else name for name in names]
    values = [b["value"] for b in sides]
    errors = [
        [b["value"] - b["interval"][0] for b in sides],
        [b["interval"][1] - b["value"] for b in sides],
    ]
    colours = {"alone": "lightgrey", "ddp gloo": "tab:orange"}
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    axes.barh(labels, values, xerr=errors, color=[colours.get(n, "tab:blue") for n in names])
    axes.invert_yaxis()
    axes.set_xlabel("images/s on 2 workers (median, quartiles)")
    figure.tight_layout()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=110)
    return FIGURE


if __name__ == "__main__":
    print(draw())
