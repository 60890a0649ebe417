"""The byte layout of a quantized stripe.

For each segment in turn, with each part at a multiple of 8 bytes:

    small        the elements in the wide dtype
    quantized    per block: scale (float32), with 1 bit two values (of the negative, of the others)
                 then per block: ceil(length * bits / 8) bytes of codes

Codes of one block are packed in planes: with m = ceil(length * bits / 8) bytes, byte j holds in its
lowest bits the code of element j, then those of elements j + m, j + 2m and so on, so that packing
and unpacking access memory in order. A code is q + levels for q in -levels .. levels. With 1 bit it
is 1 for values that are not negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchmn.comm.codecs.base import aligned
from torchmn.comm.codecs.layout import Layout

LANES = 32
"""Sums over a block use 32 lanes: lane j sums elements j, j + 32 and so on, then lanes are added in
halves. All kernels add in this order."""
MIN_BLOCK_RANGE = 1e-36
"""Blocks with a smaller range are sent as zeros."""
CLIP_FACTOR_4BIT = 2.5
"""With 4 bits, values are clipped at this multiple of their typical size."""

START, NUMEL, IS_SMALL, FLOATS, CODES = range(5)
"""Columns of `StripePlan.table`."""


@dataclass(frozen=True, eq=False)
class QuantizationSpec:
    """The parameters of quantization; the same for all stripes of a codec."""

    bits: int
    block_length: int

    @property
    def levels(self) -> int:
        """The largest code: 127, 7, 1 for 8, 4, 2 bits."""
        return (1 << (self.bits - 1)) - 1

    @property
    def num_floats(self) -> int:
        """The number of float32 numbers per block."""
        return 2 if self.bits == 1 else 1


@dataclass(frozen=True, eq=False)
class StripePlan:
    """The byte layout of a stripe. ``table`` is (num_segments, 5) int64, relative to the stripe."""

    spec: QuantizationSpec
    stripe: Layout
    table: npt.NDArray[np.int64]
    nbytes: int
    num_blocks: int


def plan_stripe(stripe: Layout, spec: QuantizationSpec) -> StripePlan:
    """Compute the byte layout of a stripe."""
    table = np.zeros((len(stripe.segments), 5), dtype=np.int64)
    position = num_blocks = 0
    for row, segment in zip(table, stripe.segments, strict=True):
        row[START] = segment.start - stripe.begin
        row[NUMEL] = segment.numel
        row[IS_SMALL] = segment.is_small
        row[FLOATS] = row[CODES] = position
        if segment.is_small:
            position = aligned(position + segment.numel * stripe.wide_dtype.itemsize)
            continue
        blocks = -(-segment.numel // spec.block_length)
        num_blocks += blocks
        row[CODES] = position + 4 * spec.num_floats * blocks
        position = aligned(int(row[CODES]) + -(-segment.numel * spec.bits // 8))
    return StripePlan(spec, stripe, table, position, num_blocks)
