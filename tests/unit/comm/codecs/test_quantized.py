"""Quantized values: their error, their size, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchmn.comm.codecs import Layout, Quantized
from torchmn.comm.codecs.layout import Segment
from torchmn.errors import UsageError

pytestmark = pytest.mark.timeout(300)  # numba compiles once per machine, on one that may be busy


def through(codec: Quantized, values: Tensor, stripe: Layout | None = None) -> Tensor:
    stripe = stripe or Layout((Segment("p", 0, values.numel()),), values.dtype)
    encoded = torch.empty(codec.stripe_nbytes(stripe), dtype=torch.uint8)
    codec.encode_stripe(values, stripe, encoded)
    out = torch.zeros_like(values)
    codec.decode_stripe(encoded, stripe, out)
    return out


def relative_error(codec: Quantized, values: Tensor) -> float:
    return float((through(codec, values) - values).norm() / values.norm())


def test_error_on_normal_and_laplace_values() -> None:
    """Near the best grid with as few levels: 0.0129, 0.190, 0.363 for a normal (Max 1960)."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(100 * 1024, generator=generator)
    uniform = torch.rand(100 * 1024, generator=generator) - 0.5
    laplace = -uniform.sign() * torch.log1p(-2 * uniform.abs())
    bars = {8: (6e-5, 1.4e-4), 4: (0.0165, 0.0275), 2: (0.192, 0.267), 1: (0.364, 0.501)}
    for bits, (bar_normal, bar_laplace) in bars.items():
        assert relative_error(Quantized(bits), normal) ** 2 < bar_normal * 1.03
        assert relative_error(Quantized(bits), laplace) ** 2 < bar_laplace * 1.03


def test_eight_bits_are_within_half_a_step() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    off = (through(Quantized(8, block_length=64), values) - values).abs()
    blocks = torch.nn.functional.pad(values, (0, -5000 % 64)).view(-1, 64)
    step = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[:5000] / 127
    assert (off <= step * 0.50001).all()


def test_one_bit_gives_the_two_means_of_each_block() -> None:
    values = torch.tensor([-1.0, -3.0, 2.0, 4.0, 0.0] * 16)
    got = through(Quantized(1, block_length=32), values)
    for start in range(0, 80, 32):
        block, out = values[start : start + 32], got[start : start + 32]
        for side in (block < 0, block >= 0):
            torch.testing.assert_close(out[side], block[side].mean().expand(int(side.sum())))


def test_one_value_of_many_gets_through_two_bits() -> None:
    values = torch.zeros(512)
    values[7] = 0.3
    torch.testing.assert_close(through(Quantized(2), values), values)


@pytest.mark.parametrize(
    ("bits", "nbytes"), [(8, 1_007_816), (4, 507_816), (2, 257_816), (1, 132_816)]
)
def test_bytes(bits: int, nbytes: int) -> None:
    codec = Quantized(bits)
    stripe = Layout.of([("w", 0, (1000, 1000))], torch.float32)
    assert codec.stripe_nbytes(stripe) == pytest.approx(nbytes, abs=8)
    assert codec.stripe_nbytes(stripe) * 8 / 1e6 == pytest.approx(codec.bits, rel=1e-3)
    assert codec.stripe_nbytes(Layout(())) == 0


def test_small_parameters_are_sent_uncompressed() -> None:
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        values = torch.randn(3000, generator=generator).to(dtype)
        stripe = Layout.of([("w", 0, (40, 50)), ("b", 2000, (1000,))], dtype)
        got = through(Quantized(1), values, stripe)
        assert torch.equal(got[2000:], values[2000:])
        assert not torch.equal(got[:2000], values[:2000])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_strides(bits: int, dtype: torch.dtype) -> None:
    for size, stride in ((1, 3), (513, 2), (2100, 3)):
        dense = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        codec, stripe = Quantized(bits), Layout((Segment("p", 0, size),), dtype)
        encoded = torch.empty(codec.stripe_nbytes(stripe), dtype=torch.uint8)
        codec.encode_stripe(dense.repeat_interleave(stride)[::stride], stripe, encoded)
        out = torch.ones(size, stride, dtype=dtype)[:, 0]
        codec.decode_stripe(encoded, stripe, out)
        assert torch.equal(out, through(codec, dense, stripe))


def test_invalid_arguments() -> None:
    with pytest.raises(UsageError, match="bits=3 must be 8, 4, 2 or 1"):
        Quantized(3)
    with pytest.raises(UsageError, match="block_length=100 must be a positive multiple of 32"):
        Quantized(8, block_length=100)
    codec, stripe = Quantized(8), Layout((Segment("p", 0, 100),))
    values = torch.zeros(100)
    for wrong in (
        torch.empty(3, dtype=torch.uint8),
        torch.empty(codec.stripe_nbytes(stripe), dtype=torch.int8),
        torch.empty(codec.stripe_nbytes(stripe) + 1, dtype=torch.uint8)[1:],
    ):
        with pytest.raises(UsageError, match="An encoded stripe must be"):
            codec.encode_stripe(values, stripe, wrong)
        with pytest.raises(UsageError, match="An encoded stripe must be"):
            codec.decode_stripe(wrong, stripe, values)
    encoded = torch.empty(codec.stripe_nbytes(stripe), dtype=torch.uint8)
    for buffer in (torch.zeros(99), torch.zeros(2, 100)):
        with pytest.raises(UsageError, match="The stripe ends at element 100, but the buffer"):
            codec.encode_stripe(buffer, stripe, encoded)
        with pytest.raises(UsageError, match="The stripe ends at element 100, but the buffer"):
            codec.decode_stripe(encoded, stripe, buffer)
    with pytest.raises(UsageError, match="has no state"):
        codec.load_state_dict({"step": 3})
