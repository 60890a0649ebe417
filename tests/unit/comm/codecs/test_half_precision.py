"""Codecs that send a narrower floating-point type."""

from __future__ import annotations

import pytest
import torch

from torchmn.comm.codecs import BFloat16, Float16, create_codec
from torchmn.comm.codecs.base import anonymous_layout
from torchmn.errors import UnknownNameError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 7])
def test_round_trip_rounds_once(codec, dtype: torch.dtype, size: int) -> None:
    values = torch.linspace(-3, 3, size).to(dtype)
    encoded = torch.empty(codec.stripe_nbytes(anonymous_layout(size, dtype)), dtype=torch.uint8)
    assert encoded.numel() == 2 * size
    codec.encode_stripe(values, anonymous_layout(len(values), values.dtype), encoded)
    decoded = torch.full((size,), 9.0, dtype=dtype)
    codec.decode_stripe(encoded, anonymous_layout(len(decoded), decoded.dtype), decoded)
    assert torch.equal(decoded, values.to(codec.dtype).to(dtype))
    again = torch.empty_like(encoded)
    codec.encode_stripe(decoded, anonymous_layout(len(decoded), decoded.dtype), again)
    if dtype not in (torch.float16, torch.bfloat16):
        assert torch.equal(again, encoded)


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


def test_names() -> None:
    assert create_codec(None) is None
    assert create_codec("float32") is None
    for name in ("float16", "bfloat16"):
        assert create_codec(name).name == name
    own = Float16()
    assert create_codec(own) is own
    with pytest.raises(UnknownNameError, match="Unknown codec 'float8'. Known: float32, float16,"):
        create_codec("float8")
