"""Error feedback: nothing is lost permanently."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmn.comm.codecs import (
    BFloat16,
    ErrorFeedback,
    Float16,
    Layout,
    PowerSGD,
    Quantized,
    StripeCodec,
    create_codec,
)
from torchmn.comm.codecs.base import anonymous_layout
from torchmn.errors import UnsupportedError, UsageError

pytestmark = pytest.mark.timeout(300)  # numba compiles once per machine, on one that may be busy

LAYOUT = Layout.of([("w", 0, (3, 701)), ("b", 2112, (64,)), ("v", 2200, (70, 40))], torch.float32)


def step(codec: StripeCodec, values: torch.Tensor, *, is_valid: bool = True) -> torch.Tensor:
    layout = LAYOUT.moved(0, values.dtype)
    encoded = torch.empty(codec.stripe_nbytes(layout), dtype=torch.uint8)
    codec.encode_stripe(values, layout, encoded)
    out = torch.zeros_like(values)
    codec.decode_stripe(encoded, layout, out)
    codec.finish(is_valid=is_valid)
    return out


def residual(codec: StripeCodec, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(LAYOUT.end, dtype=dtype)
    places = {s.name: s.start for s in LAYOUT.segments}
    for entry in codec.state_dict()["residuals"]:
        at = places[entry["name"]] + entry["offset"]
        total[at : at + entry["values"].numel()] = entry["values"]
    return total


@given(
    st.sampled_from([8, 4, 2, 1, "float16", "bfloat16"]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 12),
    st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_sum_of_sent_is_sum_of_gradients_less_the_residual(
    kind: int | str, dtype: torch.dtype, num_steps: int, seed: int
) -> None:
    inner = {"float16": Float16, "bfloat16": BFloat16}
    codec = ErrorFeedback(Quantized(kind) if isinstance(kind, int) else inner[kind]())
    generator = torch.Generator().manual_seed(seed)
    sent = true = torch.zeros(LAYOUT.end, dtype=torch.float64)
    for _ in range(num_steps):
        g = torch.randn(LAYOUT.end, generator=generator, dtype=dtype)
        sent = sent + step(codec, g).double()
        true = true + g.double()
    tolerance = (1e-5 if dtype == torch.float32 else 1e-13) * num_steps
    for s in LAYOUT.segments:  # elements between them are unspecified
        run = slice(s.start, s.end)
        lost = residual(codec, dtype).double()[run]
        torch.testing.assert_close(sent[run] + lost, true[run], rtol=0, atol=tolerance)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.sampled_from([4, 1]))
@settings(max_examples=30, deadline=None)
def test_what_is_lost_is_counted_in_means(scales: list[float], bits: int) -> None:
    """Whatever multiple of its mean each sum is."""
    codec = ErrorFeedback(Quantized(bits))
    generator = torch.Generator().manual_seed(0)
    sent = true = torch.zeros(LAYOUT.end, dtype=torch.float64)
    for scale in scales:
        mean = torch.randn(LAYOUT.end, generator=generator, dtype=torch.float64)
        codec.begin(scale)
        sent = sent + step(codec, mean * scale) / scale
        true = true + mean
    entries = codec.state_dict()["residuals"]
    assert {entry["scale"] for entry in entries} == {scales[-1]}
    lost = residual(codec, torch.float64) / scales[-1]
    for s in LAYOUT.segments:
        run = slice(s.start, s.end)
        torch.testing.assert_close(sent[run] + lost[run], true[run], rtol=0, atol=1e-11)


def test_equal_scales_change_no_bit_and_a_sum_of_nothing_no_residual() -> None:
    codecs = [create_codec("int4"), create_codec("int4")]
    for number in range(4):
        values = torch.sin(torch.arange(LAYOUT.end) * (number + 1.0))
        codecs[1].begin(0.3)
        outs = [step(codec, values) for codec in codecs]
        assert torch.equal(*outs)
    held = residual(codecs[1], torch.float32)
    codecs[1].begin(0.0)
    step(codecs[1], torch.zeros(LAYOUT.end), is_valid=False)
    assert torch.equal(residual(codecs[1], torch.float32), held)
    assert torch.equal(residual(codecs[0], torch.float32), held)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "1bit"])
def test_descent_ends_where_it_would_without_a_codec(name: str) -> None:
    """On a badly scaled quadratic; without the residual the quantized gradient stays off."""
    target = torch.linspace(-1, 1, LAYOUT.end)
    curvature = torch.logspace(-1, 0, LAYOUT.end)
    codec = create_codec(name)
    x = torch.zeros(LAYOUT.end)
    for k in range(600):
        x -= step(codec, curvature * (x - target)) * (0.3 if k < 400 else 0.03)
    for s in LAYOUT.segments:
        run = slice(s.start, s.end)
        assert (x[run] - target[run]).norm() < 0.02 * target[run].norm()


def test_small_gradients_get_through_in_time() -> None:
    """An element of a thousandth of its block's largest is below half a step of 4 bits."""
    g = torch.zeros(LAYOUT.end)
    g[::100], g[1] = 1.0, 1e-3
    codec = create_codec("int4")
    assert step(codec, g)[1] == 0
    sent = sum(float(step(codec, g)[1]) for _ in range(999))
    assert sent == pytest.approx(1.0, abs=0.2)


def test_a_discarded_exchange_leaves_no_trace() -> None:
    codec = create_codec("1bit")
    generator = torch.Generator().manual_seed(0)
    step(codec, torch.randn(LAYOUT.end, generator=generator))
    before = residual(codec, torch.float32)
    assert before.any()
    step(codec, torch.randn(LAYOUT.end, generator=generator), is_valid=False)
    assert torch.equal(residual(codec, torch.float32), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_blocks_that_are_not_finite_keep_their_residual(bad: float) -> None:
    codec = ErrorFeedback(Quantized(4, block_length=64))
    generator = torch.Generator().manual_seed(0)
    step(codec, torch.randn(LAYOUT.end, generator=generator))
    before = residual(codec, torch.float32)
    values = torch.randn(LAYOUT.end, generator=generator)
    values[70] = bad
    layout = LAYOUT
    encoded = torch.empty(codec.stripe_nbytes(layout), dtype=torch.uint8)
    codec.encode_stripe(values, layout, encoded)
    assert codec.nonfinite.names("encoding") == ["w"]
    out = torch.zeros_like(values)
    codec.decode_stripe(encoded, layout, out)
    assert codec.nonfinite.names("decoding") == ["w"]
    assert out[64:128].isnan().all()
    assert torch.isfinite(out[:64]).all()
    codec.finish(is_valid=True)
    assert codec.nonfinite.names("decoding") == []
    after = residual(codec, torch.float32)
    assert torch.equal(after[64:128], before[64:128])
    assert not torch.equal(after[:64], before[:64])


def test_flushing_adds_the_residual() -> None:
    codec = create_codec("1bit")
    g = torch.linspace(-1, 1, LAYOUT.end)
    sent = step(codec, g)
    values = torch.zeros(LAYOUT.end)
    codec.flush_residual_into(values, LAYOUT)
    codec.finish(is_valid=True)
    for s in LAYOUT.segments:
        run = slice(s.start, s.end)
        torch.testing.assert_close(values[run] + sent[run], g[run])
    assert not residual(codec, torch.float32).any()


def test_state_is_a_copy_and_survives_other_dtypes() -> None:
    codec = create_codec("1bit")
    step(codec, torch.linspace(-1, 1, LAYOUT.end))
    state = codec.state_dict()
    kept = [entry["values"].clone() for entry in state["residuals"]]
    step(codec, torch.linspace(-3, 1, LAYOUT.end))
    assert all(torch.equal(e["values"], k) for e, k in zip(state["residuals"], kept, strict=True))
    other = create_codec("1bit")
    other.load_state_dict(state)
    step(other, torch.zeros(LAYOUT.end, dtype=torch.float64))
    assert all(e["values"].dtype == torch.float64 for e in other.state_dict()["residuals"])


def test_a_new_instance_has_no_residuals() -> None:
    codec = create_codec("int2")
    step(codec, torch.linspace(-1, 1, LAYOUT.end))
    assert codec.new_instance().state_dict()["residuals"] == []
    assert (
        repr(codec.new_instance())
        == repr(codec)
        == "ErrorFeedback(Quantized(bits=2, block_length=512))"
    )


def test_warm_up_leaves_no_trace() -> None:
    codec = create_codec("int4")
    codec.warm_up(LAYOUT, torch.device("cpu"))
    assert codec.state_dict()["residuals"] == []
    assert codec.nonfinite.names("encoding") == []


def test_invalid_arguments() -> None:
    with pytest.raises(UsageError, match="already has error feedback"):
        ErrorFeedback(ErrorFeedback(Quantized(8)))
    with pytest.raises(UsageError, match="PowerSGD has its own error feedback"):
        ErrorFeedback(PowerSGD())
    with pytest.raises(UnsupportedError, match="stores residuals by parameter name"):
        create_codec("int8").encode_stripe(
            torch.zeros(10), anonymous_layout(10, torch.float32), torch.zeros(24, dtype=torch.uint8)
        )
