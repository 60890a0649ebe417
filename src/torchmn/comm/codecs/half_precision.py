"""Compression to float16 and bfloat16 (ChainerMN's ``allreduce_grad_dtype``).

Differences from ChainerMN, which summed in float16 and divided afterwards, so that a sum over W
workers overflowed above 65504 / W: gradients are divided by W before they are encoded, and owners
sum in float32. Values beyond 65504 become infinite, as `torch.amp.GradScaler` expects.

All parameters are cast, including small ones, and elements between segments are sent as well, so
that one copy is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.comm.codecs.base import Side, StripeCodec, check_encoded, span_of
from torchmn.comm.codecs.layout import Layout


class ReducedPrecision(StripeCodec):
    """Base class of codecs that send stripes in a narrower floating-point type."""

    bits = 16
    dtype: torch.dtype

    def stripe_nbytes(self, stripe: Layout) -> int:
        return stripe.span * self.dtype.itemsize

    def encode_stripe(
        self, values: Tensor, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        narrow = self._narrow(out, stripe)
        narrow.copy_(span_of(values, stripe))
        # An owner's sum is scanned when all ranks, this one included, decode it.
        if side == "worker":
            self.nonfinite.scan("encoding", stripe, narrow)

    def decode_stripe(
        self, encoded: Tensor, stripe: Layout, out: Tensor, *, add: bool = False
    ) -> None:
        narrow = self._narrow(encoded, stripe)
        span = span_of(out, stripe)
        if add:  # the sum is encoded next, and scanned then
            span.add_(narrow)
        else:
            span.copy_(narrow)
            self.nonfinite.scan("decoding", stripe, narrow)

    def _narrow(self, encoded: Tensor, stripe: Layout) -> Tensor:
        check_encoded(encoded, self.stripe_nbytes(stripe))
        return encoded.view(self.dtype)


class Float16(ReducedPrecision):
    """IEEE half precision: 11 bits of significand, largest value 65504.

    Example:
        >>> Float16().name
        'float16'
    """

    name = "float16"
    dtype = torch.float16


class BFloat16(ReducedPrecision):
    """bfloat16: 8 bits of significand, the range of float32.

    Example:
        >>> BFloat16().name
        'bfloat16'
    """

    name = "bfloat16"
    dtype = torch.bfloat16
