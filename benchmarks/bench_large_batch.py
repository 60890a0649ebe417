"""Times a step of LARS and LAMB beside public implementations, on this machine's CPU.

The parameters are those of a ResNet-50 (161 tensors, 25.6 million values) and of a small
transformer (many small tensors). The sides take turns step by step with the same gradients, and are
compared pairwise. The others are `timm` and `torch_optimizer`, as far as they are installed
(``pip install timm torch_optimizer``); a side that is missing is named.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from importlib import import_module

import torch
from record import Bar, median_bar, ratio_bar, report
from torch import nn
from torch.optim import Optimizer

from torchmn.large_batch import LAMB, LARS

DECAY = 1e-4
OURS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "LARS": lambda params: LARS(params, 0.1, 0.9, DECAY),
    "LAMB": lambda params: LAMB(params, 0.001, weight_decay=DECAY),
}


def resnet50() -> list[tuple[int, ...]]:
    """The shapes of the parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            for out, in_, kernel in ((width, before, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, in_, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, before, 1, 1), (4 * width,), (4 * width,)]
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def transformer() -> list[tuple[int, ...]]:
    """The shapes of the parameters of six small layers."""
    layer = [(384, 128), (384,), (128, 128), (128,), (512, 128), (512,), (128, 512), *[(128,)] * 5]
    return [(1000, 128), *layer * 6]


def others(name: str) -> dict[str, Callable[[list[nn.Parameter]], Optimizer]]:
    """The public implementations that are installed."""
    found: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {}
    for module, classes in {
        "timm.optim": {"LARS": "Lars", "LAMB": "Lamb"},
        "torch_optimizer": {"LARS": "LARS", "LAMB": "Lamb"},
    }.items():
        try:
            cls = getattr(import_module(module), classes[name])
        except (ImportError, RuntimeError) as error:  # torchvision of another torch
            print(f"{module} cannot be compared: {error}")
            continue
        options = {"lr": 0.1, "momentum": 0.9} if name == "LARS" else {"lr": 0.001}
        label = module.partition(".")[0]
        found[label] = lambda params, cls=cls, options=options: cls(
            params, weight_decay=DECAY, **options
        )
    return found


def side(make: Callable[[list[nn.Parameter]], Optimizer], shapes: list[tuple[int, ...]]):  # type: ignore[no-untyped-def]
    """A function that takes a step and returns its time in seconds."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator) * 0.05) for shape in shapes]
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.01
    optimizer = make(params)

    def step() -> float:
        begin = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begin

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=25, help="compared steps of each side")
    steps = parser.parse_args().steps
    bars: list[Bar] = []
    for model, shapes in {"ResNet-50": resnet50(), "transformer": transformer()}.items():
        for name, make in OURS.items():
            sides = {"ours": side(make, shapes)}
            sides |= {label: side(other, shapes) for label, other in others(name).items()}
            times: dict[str, list[float]] = {label: [] for label in sides}
            for number in range(steps + 3):
                for label in random.Random(number).sample(list(sides), len(sides)):
                    duration = sides[label]()
                    if number >= 3:
                        times[label].append(duration)
            for label, samples in times.items():
                milliseconds = [1e3 * each for each in samples]
                bars.append(median_bar(f"{model}, {name}: {label}", milliseconds, "ms"))
            for label in list(sides)[1:]:
                bar = f"{model}, {name}: time of a step, ours / {label}"
                bars.append(ratio_bar(bar, times["ours"], times[label], "<= 1.0"))
    return report("large_batch", bars)


if __name__ == "__main__":
    raise SystemExit(main())
