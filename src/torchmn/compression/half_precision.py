"""float16 and bfloat16 on the wire (ChainerMN's ``allreduce_grad_dtype``).

Differences from ChainerMN, which summed in float16 and divided afterwards, so that a sum over W
workers overflowed above 65504 / W: gradients are divided by W before they are encoded, and owners
sum in float32. Values beyond 65504 become infinite, as `torch.amp.GradScaler` expects.

Everything is narrowed, small parameters too, and elements between segments travel along: one copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.compression.base import Side, StripeCodec, check_encoded, span_of
from torchmn.compression.layout import Layout
from torchmn.compression.nonfinite import known_finite


class ReducedPrecision(StripeCodec):
    """Carries floating-point stripes in a narrower floating-point type."""

    bits = 16

    def __init__(self, name: str, wire_dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.wire_dtype = wire_dtype

    def stripe_nbytes(self, stripe: Layout) -> int:
        """See `StripeCodec.stripe_nbytes`."""
        return stripe.span * self.wire_dtype.itemsize

    def encode_stripe(
        self, values: Tensor, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        """See `StripeCodec.encode_stripe`."""
        narrow = self._narrow(out, stripe)
        narrow.copy_(span_of(values, stripe))
        if side == "worker":
            self.nonfinite.scan("encoding", stripe, narrow)

    def decode_stripe(
        self, encoded: Tensor, stripe: Layout, out: Tensor, *, add: bool = False
    ) -> None:
        """See `StripeCodec.decode_stripe`."""
        narrow = self._narrow(encoded, stripe)
        span = span_of(out, stripe)
        if add:  # whoever adds encodes the sum, and will find it in there
            span.add_(narrow)
        else:
            span.copy_(narrow)
            self.nonfinite.scan("decoding", stripe, narrow)

    def encode_with_feedback(
        self,
        values: Tensor,
        residual: Tensor,
        rest: Tensor,
        stripe: Layout,
        out: Tensor,
        side: Side = "worker",
    ) -> None:
        """See `StripeCodec.encode_with_feedback`."""
        torch.add(residual, span_of(values, stripe), out=rest)
        narrow = self._narrow(out, stripe)
        narrow.copy_(rest)
        rest.sub_(narrow)
        if known_finite(narrow):
            return
        torch.where(torch.isfinite(rest), rest, residual, out=rest)
        if side == "worker":
            self.nonfinite.scan("encoding", stripe, narrow)

    def _narrow(self, encoded: Tensor, stripe: Layout) -> Tensor:
        check_encoded(encoded, self.stripe_nbytes(stripe))
        return encoded.view(self.wire_dtype)


class Float16(ReducedPrecision):
    """IEEE half precision: 11 bits of significand, largest value 65504."""

    def __init__(self) -> None:
        super().__init__("float16", torch.float16)


class BFloat16(ReducedPrecision):
    """bfloat16: 8 bits of significand, the range of float32."""

    def __init__(self) -> None:
        super().__init__("bfloat16", torch.bfloat16)
