"""What encoding and decoding cost on one core, relative to a loop over the same bytes.

7.5 million float32 elements (30 MB) in the shapes of a VGG's convolutions, through the public
methods of the codecs. Encoding with residual reads gradient and residual and writes the new
residual and the bytes; decode-and-add reads bytes and sum and writes the sum.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import torch
from numba import njit
from record import Bar, median_bar, ratio_bar, report

from torchmn.cluster.units import MiB
from torchmn.comm.codecs import BFloat16, ErrorFeedback, Float16, Layout, Quantized
from torchmn.comm.codecs.base import StripeCodec

SHAPES = [(512, 512, 3, 3)] * 2 + [(512, 256, 3, 3), (256, 256, 3, 3), (256, 128, 3, 3)]
SHAPES += [(512, 512), (512,), (512,), (512,), (256,), (128, 128, 3, 3), (128,), (10, 512), (10,)]
ROUNDS = 41
OTHER_DATA_BYTES = 96 * MiB
CPU = torch.device("cpu")


@njit(nogil=True)
def encoding_loop(values, residual, new_residual, encoded) -> None:  # type: ignore[no-untyped-def]
    for i in range(values.size):
        new_residual[i] = values[i] + residual[i]
    for i in range(encoded.size):
        encoded[i] = i


@njit(nogil=True)
def decoding_loop(encoded, total) -> None:  # type: ignore[no-untyped-def]
    bits = 0
    for i in range(encoded.size):
        bits ^= encoded[i]
    value = np.float32(bits)
    for i in range(total.size):
        total[i] += value


def layout() -> Layout:
    entries, start = [], 0
    for index, shape in enumerate(SHAPES):
        entries.append((f"weight{index}", start, shape))
        start += -(-int(np.prod(shape)) // 16) * 16
    return Layout.of(entries, torch.float32)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def take_turns(sides: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Every side begins with nothing of its own in the caches, as it does in training."""
    other_data = np.zeros(OTHER_DATA_BYTES, np.uint8)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(ROUNDS + 2):
        for name, work in sides.items():
            other_data += 1
            spent = seconds(work)
            if turn >= 2:
                times[name].append(spent)
    return times


def measure(codec: StripeCodec, bucket: Layout, *, has_limit: bool) -> list[Bar]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(bucket.end, generator=generator) * 1e-3
    encoded = torch.zeros(codec.stripe_nbytes(bucket), dtype=torch.uint8)
    as_int32 = np.zeros(encoded.numel() // 4, np.int32)  # not its bytes, which are decoded
    total = torch.zeros(bucket.end)
    residual, new_residual = torch.zeros(2, bucket.end).numpy()
    codec.warm_up(bucket, CPU)

    def encode() -> None:
        codec.encode_stripe(values, bucket, encoded)
        codec.finish(is_valid=True)

    encode()
    times = take_turns(
        {
            "encode": encode,
            "encoding loop": lambda: encoding_loop(
                values.numpy(), residual, new_residual, as_int32
            ),
            "decode": lambda: codec.decode_stripe(encoded, bucket, total, add=True),
            "decoding loop": lambda: decoding_loop(as_int32, total.numpy()),
        }
    )
    name = codec.name
    bars = [
        ratio_bar(
            f"{name}: encode / loop",
            times["encode"],
            times["encoding loop"],
            "<= 4.0" if has_limit else None,
        ),
        ratio_bar(
            f"{name}: decode and add / loop",
            times["decode"],
            times["decoding loop"],
            "<= 3.0" if has_limit else None,
        ),
    ]
    bars += [
        median_bar(f"{name}: {side}", [1e3 * s for s in spent], "ms")
        for side, spent in times.items()
    ]
    bars.append(Bar(f"{name}: encoded bytes", encoded.numel() / (4 * bucket.numel), "x"))
    return bars


def main() -> int:
    torch.set_num_threads(1)
    gc.disable()
    bucket = layout()
    bars: list[Bar] = []
    for bits in (8, 4, 2, 1):
        bars += measure(ErrorFeedback(Quantized(bits)), bucket, has_limit=True)
    for codec in (ErrorFeedback(Float16()), ErrorFeedback(BFloat16())):
        bars += measure(codec, bucket, has_limit=False)
    return report("codecs", bars)


if __name__ == "__main__":
    raise SystemExit(main())
