"""Error feedback: nothing is lost permanently."""

from __future__ import annotations

import pytest
import torch

from torchmn.comm.codecs import (
    ErrorFeedback,
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


def test_a_stripe_that_its_owner_adds_unencoded_keeps_no_residual() -> None:
    codec = create_codec("int8")
    values = torch.linspace(-1, 1, LAYOUT.end)
    step(codec, values)  # as a worker, when another rank owned it
    held = residual(codec, torch.float32)
    assert held.any()
    for is_valid in (False, True):  # a sum that is discarded has taken nothing
        flushed = values.clone()
        codec.flush_residual_into(flushed, LAYOUT)
        assert torch.equal(flushed, values + held)
        codec.finish(is_valid=is_valid)
    assert codec.state_dict()["residuals"] == []
    for _ in range(2):
        codec.flush_residual_into(flushed, LAYOUT)
        codec.finish(is_valid=True)
    assert codec.state_dict()["residuals"] == []
    assert torch.equal(flushed, values + held)
