"""CPU kernels, compiled by numba: one pass over memory.

A block stays in the first-level cache while it is read twice, first for its range and then to be
quantized. Each inner loop does one thing and runs over slices from 0, so that LLVM vectorizes it
(4 ms instead of 32 ms as one scalar loop, for 7.5 million elements in 8 bits). Operations are
neither reordered nor fused (no fastmath), so that results are the same on every machine. Sums use
32 lanes that are added at the end.

Importing this module takes a second and needs numba; `torchmn.comm.codecs.kernels` does it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-overload, misc"

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from torchmn.comm.codecs.base import Lost
from torchmn.comm.codecs.kernels.wire_format import (
    CLIP_FACTOR_4BIT,
    CODES,
    FLOATS,
    IS_SMALL,
    LANES,
    MIN_BLOCK_RANGE,
    NUMEL,
    START,
    StripePlan,
)

_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to even
_ZERO = np.float32(0)
_ONE = np.float32(1)
_MIN_BLOCK_RANGE = np.float32(MIN_BLOCK_RANGE)
_CLIP_FACTOR_4BIT = np.float32(CLIP_FACTOR_4BIT)
_NAN = np.float32(np.nan)
_WITHOUT_SIGN = np.int32(0x7FFFFFFF)
_LANES = LANES

# nogil: kernels run on the thread of the exchange while another thread computes. The error model of
# numpy: a division by zero gives infinity or NaN instead of an exception.
_entry = njit(nogil=True, cache=True, error_model="numpy")
_inner = njit(  # wrappers for calls from Python would take as long to compile as the functions
    nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)


def encode(values: Tensor, lost: Lost | None, out: Tensor, plan: StripePlan) -> Tensor:
    """See `Kernels.encode`."""
    flags = np.zeros(len(plan.table), np.uint8)
    spec = plan.spec
    _encode(
        values.numpy(),
        None if lost is None else lost.before.numpy(),
        None if lost is None else lost.now.numpy(),
        plan.table,
        out.numpy(),
        flags,
        spec.bits,
        spec.block_length,
    )
    return torch.from_numpy(flags)


def decode(encoded: Tensor, out: Tensor, plan: StripePlan, *, add: bool) -> Tensor:
    """See `Kernels.decode`."""
    flags = np.zeros(len(plan.table), np.uint8)
    spec = plan.spec
    _decode(encoded.numpy(), out.numpy(), plan.table, flags, spec.bits, spec.block_length, add)
    return torch.from_numpy(flags)


def outer_sum(p: Tensor, q: Tensor, out: Tensor) -> None:
    """See `Kernels.outer_sum`."""
    _outer_sum(p.contiguous().numpy(), q.T.contiguous().numpy(), out.numpy())


def subtract_outer_(v: Tensor, p: Tensor, q: Tensor) -> None:
    """See `Kernels.subtract_outer_`."""
    _subtract_outer(v.numpy(), p.contiguous().numpy(), q.T.contiguous().numpy())


@_entry
def _subtract_outer(v, p, q_rows):
    for i in range(v.shape[0]):
        row = v[i]
        for k in range(q_rows.shape[0]):
            factor, other = p[i, k], q_rows[k]
            for j in range(row.size):
                row[j] -= factor * other[j]


@_entry
def _outer_sum(p, q_rows, out):
    for i in range(out.shape[0]):
        row, first = out[i], q_rows[0]
        factor = p[i, 0]
        for j in range(row.size):
            row[j] = factor * first[j]
        for k in range(1, q_rows.shape[0]):
            factor, other = p[i, k], q_rows[k]
            for j in range(row.size):
                row[j] += factor * other[j]


# ---- encoding ----


@_entry
def _encode(values, residual, new_residual, table, out, flags, bits, block_length):
    work = np.empty(block_length, np.float32)
    codes = np.empty(block_length, np.uint8)
    lanes = np.empty((3, _LANES), np.float32)
    floats = out.view(np.float32)
    levels = 1 if bits == 1 else 2 ** (bits - 1) - 1
    num_floats = 2 if bits == 1 else 1
    for s in range(table.shape[0]):
        start, numel = table[s, START], table[s, NUMEL]
        byte = table[s, CODES]
        if table[s, IS_SMALL]:
            flags[s] = _copy_small(values[start : start + numel], out[byte:])
            continue
        pair = table[s, FLOATS] // 4
        for first in range(0, numel, block_length):
            length = min(block_length, numel - first)
            begin, end = start + first, start + first + length
            v, w = values[begin:end], work[:length]
            c = out[byte : byte + length] if bits == 8 else codes[:length]
            if residual is None:
                _narrow(v, w)
            else:
                _add(v, residual[begin:end], w)
            low, high = _two_values(w, lanes, bits, levels)
            if not (np.isfinite(low) and np.isfinite(high)):
                # NaN as the scale makes all ranks decode NaN; the residual must not become NaN.
                flags[s] = 1
                floats[pair : pair + num_floats] = _NAN
                c[:] = 0
                if new_residual is not None:
                    new_residual[begin:end] = residual[begin:end]
            else:
                floats[pair] = low
                if bits == 1:
                    floats[pair + 1] = high
                if bits == 1:
                    _signs(w, c)
                    if new_residual is not None:
                        _residual_of_bits(
                            v, residual[begin:end], new_residual[begin:end], c, low, high
                        )
                else:
                    _round(w, c, high, levels)
                    if new_residual is not None:
                        _residual_of_codes(
                            v, residual[begin:end], new_residual[begin:end], c, low, levels
                        )
            pair += num_floats
            byte += length if bits == 8 else _pack(c, out[byte:], bits)


@_inner
def _copy_small(values, out):
    """Write the elements unchanged; returns whether any is not finite."""
    wide = out[: values.size * values.itemsize].view(values.dtype)
    bad = 0
    for i in range(values.size):
        wide[i] = values[i]
    for i in range(values.size):
        bad |= not np.isfinite(wide[i])
    return bad


@_inner
def _narrow(values, work):
    for i in range(work.size):
        work[i] = np.float32(values[i])


@_inner
def _add(values, residual, work):
    for i in range(work.size):
        work[i] = np.float32(values[i] + residual[i])


@_inner
def _largest(work, lanes):
    """The largest magnitude, by bit patterns: their order is that of numbers, inf and NaN last."""
    patterns = work.view(np.int32)
    largest = np.int32(0)
    for i in range(patterns.size):
        largest = max(largest, patterns[i] & _WITHOUT_SIGN)
    lanes.view(np.int32)[0, 0] = largest
    return lanes[0, 0]


@_inner
def _two_values(work, lanes, bits, levels):
    """The scale of a block and its inverse; with 1 bit its two values. NaN if not finite."""
    largest = _largest(work, lanes)
    if not np.isfinite(largest):
        return _NAN, _NAN
    if bits == 1:
        return _means_by_sign(work, lanes)
    span = largest
    if bits < 8:
        squares, magnitudes = _moments(work, lanes)
        if np.isfinite(squares) and magnitudes > _ZERO:
            typical = squares / magnitudes
            if bits == 4:
                typical *= _CLIP_FACTOR_4BIT
            span = min(span, typical)
    if span < _MIN_BLOCK_RANGE:
        return _ZERO, _ZERO
    top = np.float32(levels)
    return span / top, top / span


@_inner
def _fold(lanes):
    # In halves, as in all kernels: see `wire_format.LANES`.
    width = _LANES // 2
    while width:
        for j in range(width):
            lanes[j] += lanes[j + width]
        width //= 2
    return lanes[0]


@_inner
def _moments(work, lanes):
    """The sums of squares and of magnitudes."""
    lanes[:] = _ZERO
    squares, magnitudes = lanes[0], lanes[1]
    for i in range(0, work.size, _LANES):
        w = work[i : i + _LANES]
        for j in range(w.size):
            squares[j] += w[j] * w[j]
            magnitudes[j] += abs(w[j])
    return _fold(squares), _fold(magnitudes)


@_inner
def _means_by_sign(work, lanes):
    """The means of the negative elements and of the others; 0 if there are none."""
    lanes[:] = _ZERO
    below, above, counts = lanes[0], lanes[1], lanes[2]
    for i in range(0, work.size, _LANES):
        w = work[i : i + _LANES]
        for j in range(w.size):
            below[j] += min(w[j], _ZERO)
            above[j] += max(w[j], _ZERO)
            counts[j] += _ONE if w[j] >= _ZERO else _ZERO
    num_above = _fold(counts)
    num_below = np.float32(work.size) - num_above
    low, high = _fold(below), _fold(above)
    return (
        low / num_below if num_below > _ZERO else _ZERO,
        high / num_above if num_above > _ZERO else _ZERO,
    )


@_inner
def _round(work, codes, inverse, levels):
    top = np.int32(levels)
    for i in range(codes.size):
        q = np.int32((work[i] * inverse + _ROUND) - _ROUND)
        codes[i] = np.uint8(min(max(q, -top), top) + top)


@_inner
def _signs(work, codes):
    for i in range(codes.size):
        codes[i] = np.uint8(work[i] >= _ZERO)


@_inner
def _residual_of_codes(values, residual, new_residual, codes, scale, levels):
    top = np.int32(levels)
    for i in range(codes.size):
        new_residual[i] = (values[i] + residual[i]) - np.float32(np.int32(codes[i]) - top) * scale


@_inner
def _residual_of_bits(values, residual, new_residual, codes, low, high):
    for i in range(codes.size):
        new_residual[i] = (values[i] + residual[i]) - (high if codes[i] else low)


@_inner
def _pack(codes, out, bits):
    """Pack the codes of a block; returns the number of bytes written."""
    per_byte = 8 // bits
    nbytes = (codes.size + per_byte - 1) // per_byte
    packed = out[:nbytes]
    packed[:] = codes[:nbytes]
    for plane in range(1, per_byte):
        shift = np.uint8(plane * bits)
        part = codes[plane * nbytes : (plane + 1) * nbytes]
        for j in range(part.size):
            packed[j] |= part[j] << shift
    return nbytes


# ---- decoding ----


@_entry
def _decode(encoded, out, table, flags, bits, block_length, add):
    floats = encoded.view(np.float32)
    levels = 2 ** (bits - 1) - 1
    num_floats = 2 if bits == 1 else 1
    for s in range(table.shape[0]):
        start, numel = table[s, START], table[s, NUMEL]
        byte = table[s, CODES]
        if table[s, IS_SMALL]:
            flags[s] = _read_small(encoded[byte:], out[start : start + numel], add)
            continue
        pair = table[s, FLOATS] // 4
        for first in range(0, numel, block_length):
            length = min(block_length, numel - first)
            nbytes = (length * bits + 7) // 8
            o = out[start + first : start + first + length]
            c = encoded[byte : byte + nbytes]
            low, high = floats[pair], floats[pair + num_floats - 1]
            byte += nbytes
            pair += num_floats
            if not (np.isfinite(low) and np.isfinite(high)):
                flags[s] = 1
            if bits == 8:
                _read_bytes(c, o, low, add)
            elif bits == 1:
                _read_bits(c, o, low, high, add)
            else:
                _read_planes(c, o, low, levels, bits, add)


# ``add`` is constant within a loop, so LLVM splits it into two: as fast as separate functions.


@_inner
def _read_small(encoded, out, add):
    """Read the elements unchanged; returns whether any is not finite."""
    wide = encoded[: out.size * out.itemsize].view(out.dtype)
    bad = 0
    for i in range(out.size):
        bad |= not np.isfinite(wide[i])
    for i in range(out.size):
        out[i] = out[i] + wide[i] if add else wide[i]
    return bad


@_inner
def _read_bytes(codes, out, scale, add):
    for i in range(codes.size):
        value = np.float32(np.int32(codes[i]) - np.int32(127)) * scale
        out[i] = out[i] + value if add else value


@_inner
def _read_planes(packed, out, scale, levels, bits, add):
    top, mask = np.int32(levels), np.uint8(2**bits - 1)
    for plane in range(8 // bits):
        shift = np.uint8(plane * bits)
        part = out[plane * packed.size : (plane + 1) * packed.size]
        for j in range(part.size):
            value = np.float32(np.int32((packed[j] >> shift) & mask) - top) * scale
            part[j] = part[j] + value if add else value


@_inner
def _read_bits(packed, out, low, high, add):
    for plane in range(8):
        bit = np.uint8(1 << plane)
        part = out[plane * packed.size : (plane + 1) * packed.size]
        for j in range(part.size):
            value = high if packed[j] & bit else low
            part[j] = part[j] + value if add else value
