"""The seam of the codecs that a compressed mean carries."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class StripeCodec(Protocol):
    """Turns a stripe of a bucket into bytes and back. Local; called inside an exchange."""

    name: str

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes that `encode` writes for ``numel`` elements of ``dtype``; the same on all ranks."""

    def encode(self, stripe: Tensor, out: Tensor) -> None:
        """Encode ``stripe`` (numel,) into ``out`` (encoded_nbytes,) uint8."""

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Decode ``encoded`` (encoded_nbytes,) uint8 into ``out`` (numel,)."""
