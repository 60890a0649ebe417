"""Codec kernels beside a copy of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from record import Bar, median_bar, ratio_bar

from gpu.training import IS_SMOKE
from torchmn.cluster.units import MiB

NUM_ELEMENTS = MiB if IS_SMOKE else 64 * MiB  # 256 MiB of float32: many times any cache
NUM_TURNS, NUM_WARM_UP, NUM_CALLS = (2, 1, 1) if IS_SMOKE else (15, 3, 5)
NUM_SMALL = 200
LIMITS = {
    ("int8", "encode"): ">= 0.92",
    ("int2", "encode"): ">= 0.7",
    ("1bit", "encode"): ">= 0.7",
}
OTHER_LIMITS = {"encode": ">= 0.7", "decode and add": ">= 0.83"}


def bars(device: torch.device) -> list[Bar]:
    """The share of a copy's bandwidth of each kernel, and the host's time for a small bucket."""
    from torchmn.comm.codecs import ErrorFeedback, Layout, Quantized

    layout = Layout.of([("w", 0, (NUM_ELEMENTS // 1024, 1024))], torch.float32)
    small = Layout.of([(f"b{i}", 64 * i, (64,)) for i in range(NUM_SMALL)], torch.float32)
    values = torch.randn(NUM_ELEMENTS, device=device) * 1e-3
    total = torch.zeros_like(values)
    found: list[Bar] = []
    for bits in (8, 4, 2, 1):
        codec = ErrorFeedback(Quantized(bits))
        encoded = torch.zeros(codec.stripe_nbytes(layout), dtype=torch.uint8, device=device)
        codec.warm_up(layout, device)

        def encode(codec=codec, encoded=encoded) -> None:
            codec.encode_stripe(values, layout, encoded)
            codec.finish(is_valid=True)
            codec.nonfinite.clear()

        def decode(codec=codec, encoded=encoded) -> None:
            codec.decode_stripe(encoded, layout, total, add=True)
            codec.nonfinite.clear()

        # what each must read and write: gradient, residual, new residual, bytes; bytes, sum, sum
        moved = {"encode": 3 * values.nbytes + encoded.nbytes,
                 "decode and add": 2 * values.nbytes + encoded.nbytes,
                 "copy": 2 * values.nbytes}  # fmt: skip
        sides: dict[str, Callable[[], object]] = {
            "encode": encode,
            "decode and add": decode,
            "copy": lambda: total.copy_(values),
        }
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(NUM_WARM_UP + NUM_TURNS):
            for side, work in sides.items():
                spent_s = _seconds(work, device)
                if turn >= NUM_WARM_UP:
                    rates[side].append(moved[side] / spent_s / 1e9)
        for side in ("encode", "decode and add"):
            name = f"{codec.name}: {side}, of the bandwidth of a copy"
            limit = LIMITS.get((codec.name.split("+")[0], side), OTHER_LIMITS[side])
            found.append(ratio_bar(name, rates[side], rates["copy"], None if IS_SMOKE else limit))
        found += [median_bar(f"{codec.name}: {side}", rates[side], "GB/s") for side in sides]
        few = torch.zeros(codec.stripe_nbytes(small), dtype=torch.uint8, device=device)

        def encode_small(codec=codec, few=few) -> None:
            codec.encode_stripe(values, small, few)
            codec.nonfinite.clear()

        encode_small()
        host = []
        for _ in range(NUM_TURNS):
            began = time.perf_counter()
            for _ in range(NUM_CALLS):
                encode_small()
            host.append((time.perf_counter() - began) / NUM_CALLS * 1e6)
        found.append(median_bar(f"{codec.name}: host, {NUM_SMALL} small parameters", host, "us"))
    return found


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call; on a GPU by events around several."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(NUM_CALLS):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / NUM_CALLS
