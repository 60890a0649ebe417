"""float16 and bfloat16 on the wire (ChainerMN's ``allreduce_grad_dtype``).

Differences from ChainerMN, which summed in float16 and divided afterwards, so that a sum over W
workers overflowed above 65504 / W: gradients are divided by W before they are encoded, and owners
sum in float32. Values beyond 65504 become infinite, as `torch.amp.GradScaler` expects.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ReducedPrecision:
    """Carries floating-point stripes in a narrower floating-point type."""

    def __init__(self, name: str, wire_dtype: torch.dtype) -> None:
        self.name = name
        self.wire_dtype = wire_dtype

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """See `StripeCodec.encoded_nbytes`."""
        return numel * self.wire_dtype.itemsize

    def encode(self, stripe: Tensor, out: Tensor) -> None:
        """See `StripeCodec.encode`."""
        out.view(self.wire_dtype).copy_(stripe)

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """See `StripeCodec.decode`."""
        out.copy_(encoded.view(self.wire_dtype))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Float16(ReducedPrecision):
    """IEEE half precision: 11 bits of significand, largest value 65504."""

    def __init__(self) -> None:
        super().__init__("float16", torch.float16)


class BFloat16(ReducedPrecision):
    """bfloat16: 8 bits of significand, the range of float32."""

    def __init__(self) -> None:
        super().__init__("bfloat16", torch.bfloat16)
