"""Draws the pictures of the examples on the first page, and the badges of the README.

    python scripts/make_gallery.py

Most pictures show what their example has: images of its data set, rates of its schedules, a
recorded run of `make bench-lm`, losses of a training run that is made here. Those of divided models
and of frameworks are sketches. All are small: a palette of 32 colours.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import tomllib
import torch
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image
from sklearn.datasets import load_digits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
OURS, THEIRS, GREY, PALE = "tab:blue", "tab:orange", "#888888", "#dbe7f3"
WORKERS = ("#1f77b4", "#6aaed6", "#08306b", "#9ecae1")
PICTURES: dict[str, Callable[[Any], None]] = {}


def picture(draw: Callable[[Any], None]) -> Callable[[Any], None]:
    """Registers a function that draws a picture, under its name."""
    PICTURES[draw.__name__] = draw
    return draw


@picture
def plain(axes: Any) -> None:
    """The first 24 images of the data set."""
    images = load_digits().images[:24]
    framed = [torch.nn.functional.pad(torch.tensor(each), (1, 1, 1, 1)) for each in images]
    rows = [torch.cat(framed[i : i + 8], 1) for i in (0, 8, 16)]
    axes.imshow(torch.cat(rows), cmap="Blues")
    axes.axis("off")


@picture
def cifar(axes: Any) -> None:
    """Devices of one process, of one host, of two hosts."""
    for column, (title, hosts, each) in enumerate(
        [("one device", 1, 1), ("several devices", 1, 2), ("many nodes", 2, 2)]
    ):
        for host in range(hosts):
            top = 2.1 - 1.5 * host if hosts > 1 else 1.35
            box(axes, 3 * column, top, 2.4, 1.1, color=PALE)
            for device in range(each):
                left = 3 * column + (0.75 if each == 1 else 0.2 + 1.1 * device)
                box(axes, left, top + 0.2, 0.9, 0.7, color=WORKERS[device])
        axes.text(3 * column + 1.2, 0.05, title, ha="center", fontsize=10)
    sketch(axes, 8.6, 3.6)


@picture
def mnist(axes: Any) -> None:
    """The rate of the example's schedule: scaled with the workers, warmed up, half a cosine."""
    rate, epochs, warm_up = 0.05, 5, 1
    at = torch.linspace(0, epochs, 200)
    for number, workers in enumerate((1, 2, 4)):
        cosine = 0.5 * (1 + torch.cos(math.pi * at / epochs))
        lr = rate * workers * torch.clamp(at / warm_up, max=1) * cosine
        axes.plot(at, lr, color=WORKERS[number], label=f"{workers} worker{'s' * (workers > 1)}")
    label(axes, "epoch", "learning rate")
    axes.legend(frameon=False, fontsize=9)


@picture
def lm(axes: Any) -> None:
    """Two recorded runs of `make bench-lm`: the same seed, in the same round."""
    runs = [
        json.loads(line)
        for line in (ROOT / "benchmarks" / "records" / "lm.jsonl").read_text().splitlines()
    ]
    for name, begins, color in (("DDP", "ddp, ", THEIRS), ("DiLoCo, int4", "torchmn", OURS)):
        run = next(
            each
            for each in runs
            if each["name"].startswith(begins) and each["date"] >= "2026-11-25T17:34"
        )
        _, seconds, losses = zip(*run["curve"], strict=True)
        axes.plot(seconds, losses, color=color, label=name)
    label(axes, "seconds over 100 Mb/s", "validation loss")
    axes.legend(frameon=False, fontsize=9)


@picture
def imagenet(axes: Any) -> None:
    """The rates of both recipes, with 8 workers of 32 photos."""
    at = torch.linspace(0, 90, 400)
    warm = torch.clamp(at / 5, max=1)
    drops = sum((at >= end).double() for end in (30, 60))
    axes.plot(at, warm * 0.1**drops, color=THEIRS, label="steps")
    cosine = 0.5 * (1 + torch.cos(math.pi * torch.clamp(at - 5, min=0) / 85))
    axes.plot(at, warm * cosine, color=OURS, label="cosine")
    label(axes, "epoch", "share of the scaled rate")
    axes.legend(frameon=False, fontsize=9)


@picture
def seq2seq(axes: Any) -> None:
    """Sentences of a batch, sorted by length, on two workers."""
    generator = torch.Generator().manual_seed(0)
    lengths = sorted(torch.randint(4, 18, (16,), generator=generator).tolist())
    for row, length in enumerate(lengths):
        axes.barh(row, length, color=WORKERS[row % 2], height=0.8)
    axes.set_yticks([])
    label(axes, "tokens of a sentence", "a batch on two workers")


@picture
def frameworks(axes: Any) -> None:
    """Frameworks above, torchmn below: what calls what."""
    for number, name in enumerate(("Lightning", "Accelerate", "Transformers", "ignite")):
        box(axes, 2.2 * number, 2, 2, 1, color=PALE)
        axes.text(2.2 * number + 1, 2.5, name, ha="center", va="center", fontsize=9)
    box(axes, 0, 0.6, 8.6, 1, color=OURS)
    axes.text(4.3, 1.1, "torchmn", ha="center", va="center", color="white", fontsize=12)
    sketch(axes, 8.6, 3.6)


@picture
def tools(axes: Any) -> None:
    """Losses of a short training run on the digits."""
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    t = torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for step in range(150):
        batch = slice(32 * step % 1792, 32 * step % 1792 + 32)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[batch]), t[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    axes.plot(losses, color=WORKERS[1], linewidth=0.8)
    smooth = [sum(losses[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(losses))]
    axes.plot(smooth, color=OURS)
    label(axes, "step", "loss")


@picture
def pipeline(axes: Any) -> None:
    """Four micro-batches, one forward and one backward in turns, on two ranks."""
    first = [("F", 0, 0), ("F", 1, 1), ("B", 0, 3), ("F", 2, 4), ("B", 1, 5), ("F", 3, 6)]
    first += [("B", 2, 7), ("B", 3, 9)]
    second = [
        (kind, number, 1 + 2 * number + (kind == "B")) for number in range(4) for kind in "FB"
    ]
    for row, actions in ((1.8, first), (0.7, second)):
        for kind, number, start in actions:
            color = OURS if kind == "F" else WORKERS[3]
            box(axes, 0.8 * start + 1, row, 0.76, 0.9, color=color)
            axes.text(0.8 * start + 1.38, row + 0.45, f"{kind}{number}", ha="center", va="center",
                      color="white" if kind == "F" else "black", fontsize=8)  # fmt: skip
        axes.text(0.8, row + 0.45, f"rank {int(row < 1)}", ha="right", va="center", fontsize=9)
    sketch(axes, 9.2, 3.4)


@picture
def channels(axes: Any) -> None:
    """Planes of a convolution's output, by the rank that computes them."""
    for number in range(8):
        color = WORKERS[0] if number < 4 else WORKERS[3]
        axes.add_patch(
            Rectangle((0.45 * number, 0.25 * number), 3.4, 1.6, facecolor=color, edgecolor="white")
        )
    axes.text(0.2, 2.6, "rank 0", color=WORKERS[0], fontsize=11)
    axes.text(5, 0.9, "rank 1", color=WORKERS[1], fontsize=11)
    sketch(axes, 7, 3.6)


@picture
def islands(axes: Any) -> None:
    """Shards of two ranks in each of two islands, exchanged with their counterparts."""
    for island in (0, 1):
        box(axes, 4.6 * island, 0.4, 3.6, 2.8, color=PALE)
        for rank in (0, 1):
            box(axes, 4.6 * island + 0.4, 1.95 - 1.3 * rank, 2.8, 1, color=WORKERS[rank])
            axes.text(4.6 * island + 1.8, 2.45 - 1.3 * rank, f"shard {rank}", ha="center",
                      va="center", color="white", fontsize=10)  # fmt: skip
    for rank in (0, 1):
        axes.annotate(
            "",
            xy=(5, 2.45 - 1.3 * rank),
            xytext=(3.2, 2.45 - 1.3 * rank),
            arrowprops={"arrowstyle": "<->", "color": THEIRS},
        )
    sketch(axes, 8.4, 3.6)


@picture
def cntk(axes: Any) -> None:
    """What one bit leaves of 40 numbers: their signs, with the mean of each sign."""
    gradient = torch.randn(40, generator=torch.Generator().manual_seed(0))
    up, down = gradient[gradient >= 0].mean(), gradient[gradient < 0].mean()
    axes.bar(range(40), gradient, color=PALE, label="32 bits")
    axes.step(range(40), torch.where(gradient >= 0, up, down), where="mid", color=OURS,
              label="1 bit")  # fmt: skip
    axes.set_xticks([])
    label(axes, "", "gradient")
    axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)


def box(axes: Any, left: float, bottom: float, width: float, height: float, *, color: str) -> None:
    """A rectangle with round corners."""
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch((left, bottom), width, height, boxstyle=style, facecolor=color, linewidth=0)
    )


def sketch(axes: Any, width: float, height: float) -> None:
    """A drawing without axes."""
    axes.set_xlim(-0.1, width + 0.1)
    axes.set_ylim(-0.1, height)
    axes.axis("off")


def label(axes: Any, across: str, up: str) -> None:
    """What the axes of a chart are."""
    axes.set_xlabel(across, fontsize=10)
    axes.set_ylabel(up, fontsize=10)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def save(draw: Callable[[Any], None], path: Path) -> None:
    """Draw a picture of 480 x 270 pixels into a file."""
    figure, axes = pyplot.subplots(figsize=(4.8, 2.7), layout="constrained")
    draw(axes)
    memory = io.BytesIO()
    figure.savefig(memory, dpi=100)
    pyplot.close(figure)
    Image.open(memory).convert("RGB").quantize(32).save(path, optimize=True)


BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img">
<title>{left}: {right}</title>
<rect width="{width}" height="20" rx="3" fill="#08306b"/>
<rect width="{split}" height="20" rx="3" fill="#555"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="6" y="14">{left}</text>
<text x="{begin}" y="14">{right}</text>
</g>
</svg>
"""


def badges() -> dict[str, tuple[str, str]]:
    """The facts of pyproject.toml that the README shows, by the names of their files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    is_python = "Programming Language :: Python :: "
    versions = [c.removeprefix(is_python) for c in project["classifiers"] if is_python in c]
    systems = [c.split(" :: ")[-1] for c in project["classifiers"] if "Operating System" in c]
    return {
        "python": ("Python", f"{versions[0]} to {versions[-1]}"),
        "platform": ("system", ", ".join(systems)),
        "licence": ("licence", project["license"]),
    }


def badge(left: str, right: str) -> str:
    """A badge as SVG; the widths are those of eleven-pixel Verdana, roughly."""
    split, rest = (12 + 7 * len(text) for text in (left, right))
    return BADGE.format(left=left, right=right, split=split, width=split + rest, begin=split + 6)


def main() -> None:
    """Write all files."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    matplotlib.use("Agg")
    for name, draw in PICTURES.items():
        (FIGURES / "gallery").mkdir(exist_ok=True)
        save(draw, FIGURES / "gallery" / f"{name}.png")
    for name, (left, right) in badges().items():
        (FIGURES / "badges").mkdir(exist_ok=True)
        (FIGURES / "badges" / f"{name}.svg").write_text(badge(left, right))


if __name__ == "__main__":
    sys.exit(main())
