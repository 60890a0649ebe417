"""Measure the speed of a codec on this machine."""

from __future__ import annotations

import time

import torch

from torchmn.compression.base import Codec, StripeCodec, aligned
from torchmn.compression.layout import Layout
from torchmn.units import MiB

_NUMEL = MiB // 2
_NUM_ROUNDS = 3


def codec_seconds_per_element(codec: Codec | None, device: torch.device) -> float:
    """Seconds to encode one element and decode it twice, as every rank does in a mean. Local.

    Infinity for codecs other than `StripeCodec`, which are not timed.
    """
    if codec is None:
        return 0.0
    if not isinstance(codec, StripeCodec):
        return float("inf")
    own = codec.new_instance()
    layout = Layout.of([("sample", 0, (_NUMEL // 1024, 1024))], torch.float32)
    values = torch.linspace(-1, 1, _NUMEL, device=device)
    encoded = torch.zeros(aligned(own.stripe_nbytes(layout)), dtype=torch.uint8, device=device)
    encoded = encoded[: own.stripe_nbytes(layout)]
    own.warm_up(layout, device)
    best = float("inf")
    for _ in range(_NUM_ROUNDS + 1):
        _synchronize(device)
        started = time.perf_counter()
        own.encode_stripe(values, layout, encoded)
        for add in (False, True):
            own.decode_stripe(encoded, layout, values, add=add)
        own.finish(is_valid=True)
        _synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best / _NUMEL


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
