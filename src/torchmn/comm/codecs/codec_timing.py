"""Measurement of a codec's speed on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from torchmn.base.errors import PerformanceWarning, UnsupportedError
from torchmn.base.warn import warn
from torchmn.cluster.units import MiB
from torchmn.comm.codecs.base import Codec, StripeCodec, aligned
from torchmn.comm.codecs.layout import Layout

_NUM_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class CodecSpeed:
    """Bits sent per element, and seconds to encode and to decode one element."""

    bits: float = 32.0
    encode_s: float = 0.0
    decode_s: float = 0.0


def measure_codec(codec: Codec | None, device: torch.device) -> CodecSpeed:
    """Measure a codec on a sample. Local.

    Codecs other than `StripeCodec` are not measured, nor, with a warning, those without a compiler
    for their kernels on this rank: their times are infinite.
    """
    if codec is None:
        return CodecSpeed()
    if not isinstance(codec, StripeCodec):
        return CodecSpeed(encode_s=float("inf"), decode_s=float("inf"))
    own = codec.new_instance()
    # On a GPU as many as in a large bucket: to launch a call costs as much as its work.
    numel = MiB // 2 if device.type == "cpu" else 4 * MiB
    layout = Layout.of([("sample", 0, (numel // 1024, 1024))], torch.float32)
    values = torch.linspace(-1, 1, numel, device=device)
    encoded = torch.zeros(aligned(own.stripe_nbytes(layout)), dtype=torch.uint8, device=device)
    encoded = encoded[: own.stripe_nbytes(layout)]
    try:
        own.warm_up(layout, device)
    except UnsupportedError as error:
        warn(f"'auto' leaves codecs out: {error}", PerformanceWarning)
        return CodecSpeed(encode_s=float("inf"), decode_s=float("inf"))
    encode_s = decode_s = float("inf")
    for _ in range(_NUM_ROUNDS + 1):
        _synchronize(device)
        started = time.perf_counter()
        own.encode_stripe(values, layout, encoded)
        _synchronize(device)
        encoded_at = time.perf_counter()
        for add in (False, True):  # a mean needs both: adding what peers sent, writing the sums
            own.decode_stripe(encoded, layout, values, add=add)
        own.finish(is_valid=True)
        _synchronize(device)
        encode_s = min(encode_s, encoded_at - started)
        decode_s = min(decode_s, (time.perf_counter() - encoded_at) / 2)
    return CodecSpeed(
        bits=8 * own.stripe_nbytes(layout) / numel,
        encode_s=encode_s / numel,
        decode_s=decode_s / numel,
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
