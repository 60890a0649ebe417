"""GPU kernels in Triton: one program per block, one pass over memory.

A block is a matrix (planes, bytes): column j holds the elements whose codes share byte j, see
`wire_format`. Divisions are exact and products are not fused with additions, so that results are
bit-identical to `reference`, except that with 4, 2 and 1 bits scales are summed in another order.
With ``TRITON_INTERPRET=1``, set before Triton is imported, the kernels run on CPU tensors.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from torchmn.comm.codecs.base import Lost
from torchmn.comm.codecs.kernels.reference import outer_sum, subtract_outer_
from torchmn.comm.codecs.kernels.wire_format import (
    CLIP_FACTOR_4BIT,
    CODES,
    FLOATS,
    IS_SMALL,
    MIN_BLOCK_RANGE,
    NUMEL,
    OFFSET,
    START,
    Noise,
    StripePlan,
)
from torchmn.comm.streams import streams_of

__all__ = ["decode", "encode", "outer_sum", "subtract_outer_"]

EXACT = {"enable_fp_fusion": False}
"""Options of all kernels: products and sums are rounded separately."""
_SMALL_CHUNK = 1024
_NUM_COLUMNS = 6
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to even
_MIN_BLOCK_RANGE = tl.constexpr(MIN_BLOCK_RANGE)
_CLIP_FACTOR_4BIT = tl.constexpr(CLIP_FACTOR_4BIT)
_INFINITE_BITS = tl.constexpr(0x7F800000)


@dataclass(frozen=True)
class _Tables:
    """Tables of a plan on its GPU. Rows: start, length, float index, byte, segment, counter."""

    blocks: Tensor
    small: Tensor


_tables: weakref.WeakKeyDictionary[StripePlan, _Tables] = weakref.WeakKeyDictionary()


def encode(
    values: Tensor, lost: Lost | None, out: Tensor, plan: StripePlan, noise: Noise | None
) -> Tensor:
    """See `reference.encode`."""
    spec, tables = plan.spec, _tables_of(plan, values.device)
    flags = torch.zeros(len(plan.table), dtype=torch.uint8, device=values.device)
    keys_there = tables.blocks  # not read without noise
    if noise is not None:
        keys = torch.from_numpy(noise.keys(plan.stripe).astype(np.int64))
        keys_there = torch.empty(keys.shape, dtype=keys.dtype, device=values.device)
        streams_of(values.device).send(keys, keys_there)  # unlike .to(): no wait
    with torch.cuda.device_of(out):  # Triton launches on the current device
        if len(tables.blocks):
            _encode_block[(len(tables.blocks),)](
                values,
                values if lost is None else lost.before,
                values if lost is None else lost.now,
                out,
                out.view(torch.float32),
                flags,
                tables.blocks,
                keys_there,
                BITS=spec.bits,
                LEVELS=max(spec.levels, 1),
                IS_STOCHASTIC=spec.is_stochastic,
                HAS_RESIDUAL=lost is not None,
                PLANES=8 // spec.bits,
                BYTES=_columns(plan),
                **EXACT,
            )
        _launch_small(values, out, flags, tables, add=False, reads=True)
    return flags


def decode(encoded: Tensor, out: Tensor, plan: StripePlan, *, add: bool) -> Tensor:
    """See `reference.decode`."""
    spec, tables = plan.spec, _tables_of(plan, out.device)
    flags = torch.zeros(len(plan.table), dtype=torch.uint8, device=out.device)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        if len(tables.blocks):
            _decode_block[(len(tables.blocks),)](
                encoded,
                encoded.view(torch.float32),
                out,
                flags,
                tables.blocks,
                BITS=spec.bits,
                LEVELS=max(spec.levels, 1),
                ADD=add,
                PLANES=8 // spec.bits,
                BYTES=_columns(plan),
                **EXACT,
            )
        _launch_small(out, encoded, flags, tables, add=add, reads=False)
    return flags


def _launch_small(
    buffer: Tensor, encoded: Tensor, flags: Tensor, tables: _Tables, *, add: bool, reads: bool
) -> None:
    """Copy small parameters from the buffer to the encoded bytes if ``reads``, else back."""
    if len(tables.small):
        _copy_small[(len(tables.small),)](
            buffer,
            encoded.view(buffer.dtype),
            flags,
            tables.small,
            ADD=add,
            OUT=reads,
            CHUNK=_SMALL_CHUNK,
            **EXACT,
        )


def _columns(plan: StripePlan) -> int:
    """The number of columns of a block's matrix: bytes of its codes, rounded up to a power of 2."""
    return int(triton.next_power_of_2(plan.spec.block_length * plan.spec.bits // 8))


def _tables_of(plan: StripePlan, device: torch.device) -> _Tables:
    tables = _tables.get(plan)
    if tables is None or tables.blocks.device != device:
        none = np.zeros((0, _NUM_COLUMNS), np.int64)
        rows = {False: [none], True: [none]}
        for segment, row in enumerate(plan.table.tolist()):
            rows[bool(row[IS_SMALL])].append(_rows_of(segment, row, plan))
        tables = _tables[plan] = _Tables(
            *(torch.from_numpy(np.concatenate(rows[kind])).to(device) for kind in (False, True))
        )
    return tables


def _rows_of(segment: int, row: list[int], plan: StripePlan) -> npt.NDArray[np.int64]:
    """The rows of a segment in its table: one per block, or per chunk of a small parameter."""
    spec, is_small = plan.spec, row[IS_SMALL]
    step = _SMALL_CHUNK if is_small else spec.block_length
    first = np.arange(0, row[NUMEL], step, dtype=np.int64)
    index = first // step
    found = np.zeros((len(first), _NUM_COLUMNS), np.int64)
    found[:, 0], found[:, 1] = row[START] + first, np.minimum(step, row[NUMEL] - first)
    found[:, 4] = segment
    if is_small:
        found[:, 2] = row[CODES] // plan.stripe.wide_dtype.itemsize + first
    else:
        found[:, 2] = row[FLOATS] // 4 + index * spec.num_floats
        found[:, 3] = row[CODES] + index * spec.block_length * spec.bits // 8
        found[:, 5] = row[OFFSET] + first
    return found


# By bits and not by a comparison: infinity and NaN have all bits of the exponent set.
@triton.jit
def _is_infinite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= _INFINITE_BITS


@triton.jit
def _chance(counter):
    """A pseudorandom number in (0, 1), an odd multiple of 2**-24: `lowbias32` of a counter."""
    x = counter
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    x = x ^ (x >> 16)
    return ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _encode_block(
    values,
    residual,
    new_residual,
    out,
    floats,
    flags,
    table,
    keys,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PLANES: tl.constexpr,
    BYTES: tl.constexpr,
):
    row = table + tl.program_id(0) * 6
    start, length, pair = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    byte, segment, counter = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    nbytes = (length + PLANES - 1) // PLANES
    plane = tl.arange(0, PLANES)[:, None]
    column = tl.arange(0, BYTES)[None, :]
    element = plane * nbytes + column
    mask = (column < nbytes) & (element < length)
    v = tl.load(values + start + element, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        carried = tl.load(residual + start + element, mask=mask, other=0.0)
        v += carried
    w = v.to(tl.float32)
    magnitude = tl.abs(w)
    is_bad = _total((mask & _is_infinite(w)).to(tl.int32)) > 0
    largest = tl.max(tl.max(magnitude, axis=1), axis=0)
    # tl.where() evaluates both of its values, so divisors below must never be zero.
    if BITS == 1:
        if IS_STOCHASTIC:
            low = tl.min(tl.min(tl.where(mask, w, float("inf")), axis=1), axis=0)
            high = tl.max(tl.max(tl.where(mask, w, float("-inf")), axis=1), axis=0)
        else:
            is_above = mask & (w >= 0.0)
            num_above = _total(is_above.to(tl.float32))
            num_below = length.to(tl.float32) - num_above
            low = tl.div_rn(_total(tl.where(is_above, 0.0, w)), tl.maximum(num_below, 1.0))
            high = tl.div_rn(_total(tl.where(is_above, w, 0.0)), tl.maximum(num_above, 1.0))
    else:
        span = largest
        if BITS < 8 and not IS_STOCHASTIC:
            squares, magnitudes = _total(w * w), _total(magnitude)
            typical = tl.div_rn(squares, tl.maximum(magnitudes, tl.full([], 1e-38, tl.float32)))
            if BITS == 4:
                typical *= _CLIP_FACTOR_4BIT
            is_usable = (squares < float("inf")) & (magnitudes > 0.0)
            span = tl.where(is_usable, tl.minimum(span, typical), span)
        is_zero = span < _MIN_BLOCK_RANGE
        top = tl.full([], LEVELS, tl.float32)
        low = tl.where(is_zero, 0.0, tl.div_rn(span, top))
        high = tl.where(is_zero, 0.0, tl.div_rn(top, tl.maximum(span, _MIN_BLOCK_RANGE)))
    low, high = low.to(tl.float32), high.to(tl.float32)
    is_bad = is_bad | _is_infinite(low) | _is_infinite(high)
    if IS_STOCHASTIC:
        # Counters wrap around at 32 bits, as in the other kernels.
        first = (tl.load(keys + segment) + counter) & 0xFFFFFFFF
        chance = _chance(first.to(tl.uint32) + element.to(tl.uint32))
    if BITS == 1:
        if IS_STOCHASTIC:
            codes = (chance * (high - low) < w - low).to(tl.int32)
        else:
            codes = (w >= 0.0).to(tl.int32)
        decoded = tl.where(codes == 1, high, low)
    else:
        # The conversion of NaN to an integer is undefined.
        scaled = tl.where(is_bad, 0.0, w * high)
        if IS_STOCHASTIC:
            scaled += chance - 0.5
        q = ((scaled + _ROUND) - _ROUND).to(tl.int32)
        q = tl.minimum(tl.maximum(q, -LEVELS), LEVELS)
        decoded = q.to(tl.float32) * low
        codes = q + LEVELS
    if HAS_RESIDUAL:
        lost = tl.where(is_bad, carried, v - decoded.to(v.dtype))
        tl.store(new_residual + start + element, lost, mask=mask)
    codes = tl.where(mask & (is_bad == 0), codes, 0)
    packed = tl.sum(codes << (plane * BITS), axis=0)
    at = tl.arange(0, BYTES)
    tl.store(out + byte + at, packed.to(tl.uint8), mask=at < nbytes)
    tl.store(floats + pair, tl.where(is_bad, float("nan"), low))
    if BITS == 1:
        tl.store(floats + pair + 1, tl.where(is_bad, float("nan"), high))
    # Programs of several blocks may store to one flag at once: all store 1.
    tl.store(flags + segment, tl.full([], 1, tl.uint8), mask=is_bad)


@triton.jit
def _decode_block(
    encoded,
    floats,
    out,
    flags,
    table,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    ADD: tl.constexpr,
    PLANES: tl.constexpr,
    BYTES: tl.constexpr,
):
    row = table + tl.program_id(0) * 6
    start, length, pair = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    byte, segment = tl.load(row + 3), tl.load(row + 4)
    nbytes = (length + PLANES - 1) // PLANES
    plane = tl.arange(0, PLANES)[:, None]
    column = tl.arange(0, BYTES)[None, :]
    element = plane * nbytes + column
    mask = (column < nbytes) & (element < length)
    packed = tl.load(encoded + byte + column, mask=column < nbytes, other=0).to(tl.int32)
    codes = (packed >> (plane * BITS)) & ((1 << BITS) - 1)
    low = tl.load(floats + pair)
    is_bad = _is_infinite(low)
    if BITS == 1:
        high = tl.load(floats + pair + 1)
        is_bad = is_bad | _is_infinite(high)
        decoded = tl.where(codes == 1, high, low)
    else:
        decoded = (codes - LEVELS).to(tl.float32) * low
    decoded = decoded.to(out.dtype.element_ty)
    if ADD:
        decoded += tl.load(out + start + element, mask=mask, other=0.0)
    tl.store(out + start + element, decoded, mask=mask)
    tl.store(flags + segment, tl.full([], 1, tl.uint8), mask=is_bad)


@triton.jit
def _copy_small(
    buffer, encoded, flags, table, ADD: tl.constexpr, OUT: tl.constexpr, CHUNK: tl.constexpr
):
    """Copy a chunk of a small parameter from the buffer to the encoded bytes, or back."""
    row = table + tl.program_id(0) * 6
    start, length, place = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    segment = tl.load(row + 4)
    element = tl.arange(0, CHUNK)
    mask = element < length
    if OUT:
        x = tl.load(buffer + start + element, mask=mask, other=0.0)
    else:
        x = tl.load(encoded + place + element, mask=mask, other=0.0)
    # x - x is NaN for infinity and NaN, and 0 for any other number.
    is_bad = tl.sum((mask & ((x - x) != 0.0)).to(tl.int32), axis=0) > 0
    tl.store(flags + segment, tl.full([], 1, tl.uint8), mask=is_bad)
    if OUT:
        tl.store(encoded + place + element, x, mask=mask)
    else:
        if ADD:
            x += tl.load(buffer + start + element, mask=mask, other=0.0)
        tl.store(buffer + start + element, x, mask=mask)
