"""A model too small to gain: the MNIST perceptron 784-1000-1000-10, step time over DDP's."""

from __future__ import annotations

from bench_vgg import SIDES, measure
from record import Bar, median_bar, ratio_bar, report

NUM_STEPS = 150


def main() -> int:
    bars: list[Bar] = []
    for backend in ("auto", "gloo"):
        times = measure("mlp", backend, NUM_STEPS)
        for side, seconds in times.items():
            milliseconds = [1e3 * s for s in seconds]
            bars.append(median_bar(f"backend {backend}: {side}", milliseconds, "ms a step"))
        for side in SIDES[2:]:
            name = f"backend {backend}: time, {side} / ddp gloo"
            limit = "<= 1.0" if side == "auto" else None
            bars.append(ratio_bar(name, times[side], times["ddp gloo"], limit))
    return report("overhead", bars)


if __name__ == "__main__":
    raise SystemExit(main())
