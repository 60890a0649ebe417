"""Compiled kernels give the bits of the reference."""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.comm.codecs.kernels import reference
from torchmn.comm.codecs import Layout, Quantized
from torchmn.comm.codecs.base import Lost
from torchmn.comm.codecs.codec_timing import measure_codec
from torchmn.comm.codecs.kernels import Kernels, kernels_for
from torchmn.comm.codecs.layout import Segment
from torchmn.errors import PerformanceWarning, UnknownNameError, UnsupportedError

pytestmark = pytest.mark.timeout(300)  # numba compiles once per machine, on one that may be busy


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    pytest.importorskip("numba", reason="numba is not installed")
    return kernels_for("cpu")


def both(
    compiled: Kernels, codec: Quantized, stripe: Layout, values: Tensor, residual: Tensor | None
) -> None:
    """Encode and decode by both, and compare everything that they write."""
    plan = codec.plan(stripe)
    written = []
    for kernels in (compiled, reference):
        lost = None if residual is None else Lost(residual, torch.full_like(residual, 5.0))
        encoded = torch.zeros(plan.nbytes, dtype=torch.uint8)
        flags = kernels.encode(values, lost, encoded, plan)
        decoded = torch.full_like(values, 0.25)
        flags_set = kernels.decode(encoded, decoded, plan, add=False)
        added = torch.full_like(values, 0.25)
        flags_added = kernels.decode(encoded, added, plan, add=True)
        new_residual = None if lost is None else lost.now
        written.append([encoded, flags, decoded, flags_set, added, flags_added, new_residual])
    for ours, theirs in zip(*written, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    encoded, flags, decoded, *_, new_residual = written[0]
    if residual is not None and not flags.any():
        for s in stripe.segments:
            if not s.is_small:
                run = slice(s.start, s.end)
                v = values[run] + residual[run]
                assert torch.equal(new_residual[run], v - decoded[run])


LENGTHS = st.lists(st.integers(1, 3000), min_size=0, max_size=4)


@given(
    LENGTHS,
    st.sampled_from([8, 4, 2, 1]),
    st.sampled_from([32, 96, 512, 1024]),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.integers(0, 2**16),
)
@settings(max_examples=80, deadline=None)
@example([], 8, 512, torch.float32, True, 0)
@example([1], 1, 32, torch.float32, True, 0)
@example([1, 1024], 4, 512, torch.float64, True, 0)
@example([1, 1023, 1864], 8, 32, torch.float64, False, 0)  # nearly half between two codes
def test_bits_are_the_reference(
    compiled: Kernels,
    lengths: list[int],
    bits: int,
    block_length: int,
    dtype: torch.dtype,
    has_residual: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    segments, start = [], 0
    for index, length in enumerate(lengths):
        offset = block_length * (seed % 3)
        segments.append(Segment(f"p{index}", start, length, offset, length % 5 == 0))
        start += length + index
    stripe = Layout(tuple(segments), dtype)
    codec = Quantized(bits, block_length=block_length)
    values = torch.randn(stripe.end, generator=generator, dtype=dtype)
    values *= torch.rand(stripe.end, generator=generator, dtype=dtype) ** 4  # small ones too
    values[torch.rand(stripe.end, generator=generator) < 0.1] = 0
    residual = torch.randn(stripe.end, generator=generator, dtype=dtype) if has_residual else None
    both(compiled, codec, stripe, values, residual)


EXTREMES = {
    "zeros": [0.0],
    "negative zeros": [-0.0],
    "constant": [0.1],
    "negative": [-3.0, -4.0],
    "denormal": [1e-42, -1e-41, 0.0],
    "tiny": [1e-36, -3e-37, 2e-36],
    "huge": [3e38, -3e38, 1.0],
    "squares overflow": [1e25, -2e25, 1e20],
    "squares vanish": [1e-25, -2e-25, 3e-25],
    "one spike": [1e3, *[1e-6] * 200],
    "halves": [0.5, 1.5, 2.5, -0.5, -1.5, 127.0],
    "infinite": [1.0, float("inf"), -1.0],
    "not a number": [1.0, float("nan")],
    "both infinities": [float("inf"), float("-inf")],
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_extreme_values(compiled: Kernels, name: str, bits: int) -> None:
    values = torch.tensor(EXTREMES[name]).repeat(1000)[:1000]
    stripe = Layout((Segment("p", 0, 1000),))
    codec = Quantized(bits, block_length=96)
    residual = torch.linspace(-1e-3, 1e-3, 1000) if name == "not a number" else torch.zeros(1000)
    both(compiled, codec, stripe, values, residual)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu", r"on cpu needs numba, .*: pip install 'torchmn\[compression\]'"),
        ("cuda", r"on cuda needs triton, .*: pip install triton"),
    ],
)
def test_without_a_compiler_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, device: str, message: str
) -> None:
    def not_installed(name: str) -> ModuleType:
        raise ImportError(f"No module named {name!r}")

    kernels_for.cache_clear()
    monkeypatch.setattr(importlib, "import_module", not_installed)
    with pytest.raises(UnsupportedError, match=message):
        kernels_for(device)
    # 'auto' measures a codec before it may choose it.
    with pytest.warns(PerformanceWarning, match=r"'auto' leaves codecs out: .* needs numba"):
        assert measure_codec(Quantized(8), torch.device("cpu")).encode_s == math.inf


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"'xpu'\. Known: cpu, cuda"):
        kernels_for("xpu")
