"""Codecs that send a narrower floating-point type."""

import torch

from torchmn.comm.codecs import BFloat16, Float16
from torchmn.comm.codecs.base import anonymous_layout


def test_range() -> None:
    values = torch.tensor([65504.0, 70000.0, -70000.0, float("nan"), 6e-8])
    for codec, expected in (
        (Float16(), [65504.0, float("inf"), float("-inf"), float("nan"), 6e-8]),
        (BFloat16(), [65536.0, 70000.0, -70000.0, float("nan"), 6e-8]),
    ):
        encoded = torch.empty(10, dtype=torch.uint8)
        codec.encode_stripe(values, anonymous_layout(len(values), values.dtype), encoded)
        decoded = torch.empty(5)
        codec.decode_stripe(encoded, anonymous_layout(len(decoded), decoded.dtype), decoded)
        torch.testing.assert_close(
            decoded, torch.tensor(expected), rtol=1e-2, atol=1e-8, equal_nan=True
        )
