"""GPU kernels in Triton: one launch for a stripe, one pass over memory.

A block is a matrix (planes, bytes): column j holds the elements whose codes share byte j, see
`wire_format`. A program encodes or decodes several whole blocks of one parameter, whose positions
are constants then, so that neighbouring elements are loaded together; or one block, which may be
shorter; or a part of a small parameter, which is copied. Divisions are exact and products are not
fused with additions, so that results are bit-identical to `cpu`, except that with 4, 2 and 1 bits
scales are summed in another order. With ``TRITON_INTERPRET=1``, set before Triton is imported,
the kernels run on CPU tensors.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from torchmn.comm.codecs.base import Lost
from torchmn.comm.codecs.kernels.wire_format import (
    CLIP_FACTOR_4BIT,
    CODES,
    FLOATS,
    IS_SMALL,
    MIN_BLOCK_RANGE,
    NUMEL,
    START,
    StripePlan,
)
from torchmn.comm.streams import streams_of

EXACT = {"enable_fp_fusion": False}
"""Options of all kernels: products and sums are rounded separately."""
_PROGRAM_NUMEL = 1024
"""The elements of a program: 8 for each of its 128 threads."""
_VECTOR_NUMEL = tl.constexpr(16)
"""Parameters that begin at a multiple of this, as in buckets, are read by vectors of elements."""
_NUM_COLUMNS = 6
_NUM_FLAGS = 4096
_POINTER_NBYTES = 16
"""Triton compiles a kernel once more for tensors that do not begin at a multiple of this."""
_WHOLE, _SINGLE, _SMALL = map(tl.constexpr, range(3))
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to even
_MIN_BLOCK_RANGE = tl.constexpr(MIN_BLOCK_RANGE)
_CLIP_FACTOR_4BIT = tl.constexpr(CLIP_FACTOR_4BIT)
_INFINITE_BITS = tl.constexpr(0x7F800000)
_CHUNK = tl.constexpr(_PROGRAM_NUMEL)


_programs: weakref.WeakKeyDictionary[StripePlan, Tensor] = weakref.WeakKeyDictionary()
"""What each program does with a stripe of a plan, on its GPU.

Columns: start, length, float index, byte, segment, kind.
"""


def encode(values: Tensor, lost: Lost | None, out: Tensor, plan: StripePlan) -> Tensor:
    """See `Kernels.encode`."""
    programs = _programs_of(plan, values.device)
    flags = _cleared_flags(len(plan.table), values.device)
    if len(programs):
        with torch.cuda.device_of(out):  # Triton launches on the current device
            _encode[(len(programs),)](
                values,
                values if lost is None else lost.before,
                values if lost is None else lost.now,
                out,
                out.view(torch.float32),
                out.view(values.dtype),
                flags,
                programs,
                HAS_RESIDUAL=lost is not None,
                **_constants(plan),
                **EXACT,
            )
    return flags


def decode(encoded: Tensor, out: Tensor, plan: StripePlan, *, add: bool) -> Tensor:
    """See `Kernels.decode`."""
    programs = _programs_of(plan, out.device)
    flags = _cleared_flags(len(plan.table), out.device)
    if len(programs):
        with torch.cuda.device_of(out):  # Triton launches on the current device
            _decode[(len(programs),)](
                encoded,
                encoded.view(torch.float32),
                encoded.view(out.dtype),
                out,
                flags,
                programs,
                ADD=add,
                **_constants(plan),
                **EXACT,
            )
    return flags


def outer_sum(p: Tensor, q: Tensor, out: Tensor) -> None:
    """See `Kernels.outer_sum`."""
    torch.mul(p[:, :1], q[:, 0], out=out)
    for k in range(1, p.shape[1]):
        out += p[:, k : k + 1] * q[:, k]


def subtract_outer_(v: Tensor, p: Tensor, q: Tensor) -> None:
    """See `Kernels.subtract_outer_`."""
    for k in range(p.shape[1]):
        v -= p[:, k : k + 1] * q[:, k]


def _constants(plan: StripePlan) -> dict[str, int]:
    """The constants for which both kernels are compiled."""
    bits, length = plan.spec.bits, plan.spec.block_length
    nbytes = int(triton.next_power_of_2(length * bits // 8))
    return {"BITS": bits, "LENGTH": length, "BYTES": nbytes, "NUM": _blocks_of_a_program(length)}


def _blocks_of_a_program(block_length: int) -> int:
    """The number of whole blocks that one program handles: a power of 2."""
    return 1 << (max(1, _PROGRAM_NUMEL // block_length).bit_length() - 1)


_flags: dict[tuple[torch.device, Hashable], Tensor] = {}
_taking = threading.Lock()


def _cleared_flags(count: int, device: torch.device) -> Tensor:
    """Zeros (count,), uint8, that no other call gets.

    They are a part of a larger tensor, so that most calls allocate and clear nothing. Each stream
    has its own, which is cleared in its order.
    """
    key = (device, streams_of(device).current())
    taken = -(-count // _POINTER_NBYTES) * _POINTER_NBYTES
    with _taking:
        left = _flags.get(key)
        if left is None or len(left) < taken:
            with torch.inference_mode(False):  # the rest of it is used outside inference mode
                left = torch.zeros(max(taken, _NUM_FLAGS), dtype=torch.uint8, device=device)
        _flags[key] = left[taken:]
    return left[:count]


def _programs_of(plan: StripePlan, device: torch.device) -> Tensor:
    programs = _programs.get(plan)
    if programs is None or programs.device != device:
        rows = [np.zeros((0, _NUM_COLUMNS), np.int64)]
        rows += [_rows_of(segment, row, plan) for segment, row in enumerate(plan.table.tolist())]
        programs = _programs[plan] = torch.from_numpy(np.concatenate(rows)).to(device)
    return programs


def _rows_of(segment: int, row: list[int], plan: StripePlan) -> npt.NDArray[np.int64]:
    """The programs of a segment: one for some whole blocks, for a block, or for a chunk."""
    spec, numel, is_small = plan.spec, row[NUMEL], row[IS_SMALL]
    step = _PROGRAM_NUMEL if is_small else spec.block_length
    num = _blocks_of_a_program(step)
    num_whole = 0 if is_small or row[START] % _VECTOR_NUMEL.value else numel // (step * num)
    index = np.concatenate([
        np.arange(num_whole, dtype=np.int64) * num,
        np.arange(num_whole * num, -(-numel // step), dtype=np.int64),
    ])  # fmt: skip
    first = index * step
    found = np.zeros((len(first), _NUM_COLUMNS), np.int64)
    found[:, 0], found[:, 1] = row[START] + first, np.minimum(step, numel - first)
    found[:, 4], found[:, 5] = segment, (_SMALL if is_small else _SINGLE).value
    if is_small:
        found[:, 2] = row[CODES] // plan.stripe.wide_dtype.itemsize + first
    else:
        found[:num_whole, 5] = _WHOLE.value
        found[:, 2] = row[FLOATS] // 4 + index * spec.num_floats
        found[:, 3] = row[CODES] + index * spec.block_length * spec.bits // 8
    return found


# By bits and not by a comparison: infinity and NaN have all bits of the exponent set.
@triton.jit
def _is_infinite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= _INFINITE_BITS


@triton.jit
def _total(x):
    """The sum of each block."""
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def _each(x):
    """A value of each block, to be combined with its elements."""
    return x[:, None, None]


@triton.jit
def _encode_blocks(
    row, values, residual, new_residual, out, floats, flags,
    BITS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    LENGTH: tl.constexpr, BYTES: tl.constexpr, NUM: tl.constexpr, ARE_WHOLE: tl.constexpr,
):  # fmt: skip
    """Encode ``NUM`` whole blocks, or one that may be shorter."""
    PLANES: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = (1 << (BITS - 1)) - 1
    FLOATS_OF_BLOCK: tl.constexpr = 2 if BITS == 1 else 1
    start, length, pair = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    byte, segment = tl.load(row + 3), tl.load(row + 4)
    block = tl.arange(0, NUM)
    plane = tl.arange(0, PLANES)[None, :, None]
    column = tl.arange(0, BYTES)[None, None, :]
    if ARE_WHOLE:
        start, byte = tl.multiple_of(start, _VECTOR_NUMEL), tl.multiple_of(byte, 4)
        nbytes = LENGTH // PLANES
        numel = tl.full([], LENGTH, tl.float32)
        element = _each(block) * LENGTH + plane * nbytes + column
        mask = column < nbytes
    else:
        nbytes = (length + PLANES - 1) // PLANES
        numel = length.to(tl.float32)
        element = _each(block) + plane * nbytes + column  # block is 0
        mask = (column < nbytes) & (element < length)
    v = tl.load(values + start + element, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        carried = tl.load(residual + start + element, mask=mask, other=0.0)
        v += carried
    w = v.to(tl.float32)
    # The bits of magnitudes are ordered as they are, and those of infinity and NaN come last.
    magnitude_bits = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_bits = tl.max(tl.max(magnitude_bits, axis=2), axis=1)
    is_bad = largest_bits >= _INFINITE_BITS
    # tl.where() evaluates both of its values, so divisors below must never be zero.
    if BITS == 1:
        is_above = mask & (w >= 0.0)
        num_above = _total(is_above.to(tl.float32))
        num_below = numel - num_above
        low = tl.div_rn(_total(tl.where(is_above, 0.0, w)), tl.maximum(num_below, 1.0))
        high = tl.div_rn(_total(tl.where(is_above, w, 0.0)), tl.maximum(num_above, 1.0))
    else:
        span = largest_bits.to(tl.float32, bitcast=True)
        if BITS < 8:
            squares, magnitudes = _total(w * w), _total(tl.abs(w))
            tiny = tl.full([], 1e-38, tl.float32)
            typical = tl.div_rn(squares, tl.maximum(magnitudes, tiny))
            if BITS == 4:
                typical *= _CLIP_FACTOR_4BIT
            is_usable = (squares < float("inf")) & (magnitudes > 0.0)
            span = tl.where(is_usable, tl.minimum(span, typical), span)
        is_zero = span < _MIN_BLOCK_RANGE
        top = tl.full([NUM], LEVELS, tl.float32)
        low = tl.where(is_zero, 0.0, tl.div_rn(span, top))
        high = tl.where(is_zero, 0.0, tl.div_rn(top, tl.maximum(span, _MIN_BLOCK_RANGE)))
    low, high = low.to(tl.float32), high.to(tl.float32)
    is_bad = is_bad | _is_infinite(low) | _is_infinite(high)
    if BITS == 1:
        codes = (w >= 0.0).to(tl.int32)
        decoded = tl.where(codes == 1, _each(high), _each(low))
    else:
        # The conversion of NaN to an integer is undefined.
        scaled = tl.where(_each(is_bad), 0.0, w * _each(high))
        q = ((scaled + _ROUND) - _ROUND).to(tl.int32)
        q = tl.minimum(tl.maximum(q, -LEVELS), LEVELS)
        decoded = q.to(tl.float32) * _each(low)
        codes = q + LEVELS
    if HAS_RESIDUAL:
        lost = tl.where(_each(is_bad), carried, v - decoded.to(v.dtype))
        tl.store(new_residual + start + element, lost, mask=mask)
    codes = tl.where(mask & (_each(is_bad) == 0), codes, 0)
    packed = tl.sum(codes << (plane * BITS), axis=1)
    at = tl.arange(0, BYTES)[None, :]
    place = out + byte + block[:, None] * nbytes + at
    tl.store(place, packed.to(tl.uint8), mask=at < nbytes)
    pairs = floats + pair + block * FLOATS_OF_BLOCK
    tl.store(pairs, tl.where(is_bad, float("nan"), low))
    if BITS == 1:
        tl.store(pairs + 1, tl.where(is_bad, float("nan"), high))
    # Programs of several blocks may store to one flag at once: all store 1.
    tl.store(flags + segment + block * 0, tl.full([NUM], 1, tl.uint8), mask=is_bad)


@triton.jit
def _decode_blocks(
    row, encoded, floats, out, flags,
    BITS: tl.constexpr, ADD: tl.constexpr,
    LENGTH: tl.constexpr, BYTES: tl.constexpr, NUM: tl.constexpr, ARE_WHOLE: tl.constexpr,
):  # fmt: skip
    """Decode ``NUM`` whole blocks, or one that may be shorter."""
    PLANES: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = (1 << (BITS - 1)) - 1
    FLOATS_OF_BLOCK: tl.constexpr = 2 if BITS == 1 else 1
    start, length, pair = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    byte, segment = tl.load(row + 3), tl.load(row + 4)
    block = tl.arange(0, NUM)
    plane = tl.arange(0, PLANES)[None, :, None]
    column = tl.arange(0, BYTES)[None, None, :]
    if ARE_WHOLE:
        start, byte = tl.multiple_of(start, _VECTOR_NUMEL), tl.multiple_of(byte, 4)
        nbytes = LENGTH // PLANES
        element = _each(block) * LENGTH + plane * nbytes + column
        mask = column < nbytes
    else:
        nbytes = (length + PLANES - 1) // PLANES
        element = _each(block) + plane * nbytes + column  # block is 0
        mask = (column < nbytes) & (element < length)
    place = encoded + byte + _each(block) * nbytes + column
    packed = tl.load(place, mask=column < nbytes, other=0).to(tl.int32)
    codes = (packed >> (plane * BITS)) & ((1 << BITS) - 1)
    pairs = floats + pair + block * FLOATS_OF_BLOCK
    low = tl.load(pairs)
    is_bad = _is_infinite(low)
    if BITS == 1:
        high = tl.load(pairs + 1)
        is_bad = is_bad | _is_infinite(high)
        decoded = tl.where(codes == 1, _each(high), _each(low))
    else:
        decoded = (codes - LEVELS).to(tl.float32) * _each(low)
    decoded = decoded.to(out.dtype.element_ty)
    if ADD:
        decoded += tl.load(out + start + element, mask=mask, other=0.0)
    tl.store(out + start + element, decoded, mask=mask)
    tl.store(flags + segment + block * 0, tl.full([NUM], 1, tl.uint8), mask=is_bad)


@triton.jit
def _copy_small(row, buffer, encoded, flags, ADD: tl.constexpr, OUT: tl.constexpr):
    """Copy a chunk of a small parameter from the buffer to the encoded bytes, or back."""
    start, length, place = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    segment = tl.load(row + 4)
    element = tl.arange(0, _CHUNK)
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


@triton.jit
def _encode(
    values, residual, new_residual, out, floats, wide, flags, table,
    BITS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    LENGTH: tl.constexpr, BYTES: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * 6
    kind = tl.load(row + 5)
    if kind == _WHOLE:
        _encode_blocks(row, values, residual, new_residual, out, floats, flags, BITS,
                       HAS_RESIDUAL, LENGTH, BYTES, NUM, True)  # fmt: skip
    elif kind == _SINGLE:
        _encode_blocks(row, values, residual, new_residual, out, floats, flags, BITS,
                       HAS_RESIDUAL, LENGTH, BYTES, 1, False)  # fmt: skip
    else:
        _copy_small(row, values, wide, flags, False, True)


@triton.jit
def _decode(
    encoded, floats, wide, out, flags, table,
    BITS: tl.constexpr, ADD: tl.constexpr,
    LENGTH: tl.constexpr, BYTES: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * 6
    kind = tl.load(row + 5)
    if kind == _WHOLE:
        _decode_blocks(row, encoded, floats, out, flags, BITS, ADD, LENGTH, BYTES, NUM, True)
    elif kind == _SINGLE:
        _decode_blocks(row, encoded, floats, out, flags, BITS, ADD, LENGTH, BYTES, 1, False)
    else:
        _copy_small(row, out, wide, flags, ADD, False)
