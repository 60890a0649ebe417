"""The kernels in plain torch, where blocks are rows of a matrix.

The compiled kernels have to give the same bits.
"""

from __future__ import annotations

import torch
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
    QuantizationSpec,
    StripePlan,
)

_ROUND = 12582912.0  # 1.5 * 2**23: adding and subtracting it in float32 rounds to even


def encode(values: Tensor, lost: Lost | None, out: Tensor, plan: StripePlan) -> Tensor:
    """See `Kernels.encode`."""
    spec = plan.spec
    flags = torch.zeros(len(plan.table), dtype=torch.uint8, device=values.device)
    for s, row in enumerate(plan.table.tolist()):
        own = slice(row[START], row[START] + row[NUMEL])
        if row[IS_SMALL]:
            _view(out, row[CODES], row[NUMEL], values.dtype).copy_(values[own])
            flags[s] = ~torch.isfinite(values[own]).all()
            continue
        v = values[own] if lost is None else values[own] + lost.before[own]
        floats, packed, decoded, bad = [], [], [], []
        for rows in _rows(v, spec):
            pair, codes, is_bad = _encode_rows(rows.float(), spec)
            floats.append(pair.flatten())
            packed.append(_pack(codes, spec.bits).flatten())
            decoded.append(_values_of(codes, pair, spec).flatten())
            bad.append(is_bad[:, None].expand_as(rows).flatten())
        _write(out, row[FLOATS], torch.cat(floats).view(torch.uint8))
        _write(out, row[CODES], torch.cat(packed))
        flags[s] = torch.cat(bad).any()
        if lost is not None:
            torch.where(torch.cat(bad), lost.before[own], v - torch.cat(decoded), out=lost.now[own])
    return flags


def decode(encoded: Tensor, out: Tensor, plan: StripePlan, *, add: bool) -> Tensor:
    """See `Kernels.decode`."""
    spec = plan.spec
    flags = torch.zeros(len(plan.table), dtype=torch.uint8, device=out.device)
    for s, row in enumerate(plan.table.tolist()):
        own = out[row[START] : row[START] + row[NUMEL]]
        if row[IS_SMALL]:
            decoded = _view(encoded, row[CODES], row[NUMEL], out.dtype)
            flags[s] = ~torch.isfinite(decoded).all()
        else:
            parts = []
            pair_at, byte = row[FLOATS], row[CODES]
            for rows in _rows(own, spec):
                num, length = rows.shape
                pairs = _view(encoded, pair_at, num * spec.num_floats, torch.float32)
                nbytes = -(-length * spec.bits // 8)
                codes = _unpack(
                    encoded[byte : byte + num * nbytes].view(num, nbytes), length, spec.bits
                )
                parts.append(_values_of(codes, pairs.view(num, -1), spec).flatten())
                flags[s] |= ~torch.isfinite(pairs).all()
                pair_at += 4 * pairs.numel()
                byte += num * nbytes
            decoded = torch.cat(parts)
        own.add_(decoded) if add else own.copy_(decoded)
    return flags


# ---- one block a row ----


def _encode_rows(work: Tensor, spec: QuantizationSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Encode rows (blocks, length) float32.

    Returns the numbers (blocks, num_floats), the codes, and which blocks are not finite.
    """
    largest = work.abs().amax(dim=1)
    if spec.bits == 1:
        low, high = _means_by_sign(work)
    else:
        span = largest
        if spec.bits < 8:
            squares, magnitudes = _sum(work * work), _sum(work.abs())
            typical = squares / magnitudes
            if spec.bits == 4:
                typical = typical * CLIP_FACTOR_4BIT
            is_usable = torch.isfinite(squares) & (magnitudes > 0)
            span = torch.where(is_usable, torch.minimum(span, typical), span)
        is_zero = span < MIN_BLOCK_RANGE
        # By a tensor: on a GPU torch divides by a number by multiplying with its reciprocal, which
        # has other bits.
        low = torch.where(is_zero, 0.0, span / torch.full_like(span, spec.levels))
        inverse = torch.full_like(span, spec.levels) / span  # number / tensor rounds twice
        high = torch.where(is_zero, 0.0, inverse)
    bad = ~(torch.isfinite(largest) & torch.isfinite(low) & torch.isfinite(high))
    if spec.bits == 1:
        codes = work >= 0
    else:
        scaled = work * high[:, None]
        rounded = torch.where(bad[:, None], 0.0, (scaled + _ROUND) - _ROUND)
        codes = rounded.clamp(-spec.levels, spec.levels) + spec.levels
    codes = torch.where(bad[:, None], 0, codes.to(torch.uint8))
    numbers = torch.stack([low, high], dim=1)[:, : spec.num_floats]
    return torch.where(bad[:, None], float("nan"), numbers), codes, bad


def _sum(terms: Tensor) -> Tensor:
    """The sums of rows, computed in lanes, see `wire_format.LANES`."""
    padding = -terms.shape[1] % LANES
    lanes = torch.nn.functional.pad(terms, (0, padding)).view(len(terms), -1, LANES)
    total = torch.zeros_like(lanes[:, 0])
    for row in lanes.unbind(dim=1):
        total = total + row
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _means_by_sign(work: Tensor) -> tuple[Tensor, Tensor]:
    num_above = (work >= 0).sum(dim=1).float()
    num_below = work.shape[1] - num_above
    low = torch.where(num_below > 0, _sum(work.clamp(max=0)) / num_below, 0.0)
    return low, torch.where(num_above > 0, _sum(work.clamp(min=0)) / num_above, 0.0)


def _values_of(codes: Tensor, numbers: Tensor, spec: QuantizationSpec) -> Tensor:
    if spec.bits == 1:
        return torch.where(codes.bool(), numbers[:, 1:], numbers[:, :1])
    return (codes.float() - spec.levels) * numbers


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (blocks, length) into bytes (blocks, nbytes), in planes."""
    nbytes = -(-codes.shape[1] * bits // 8)
    packed = codes.new_zeros((len(codes), nbytes))
    for plane, part in enumerate(codes.split(nbytes, dim=1)):
        packed[:, : part.shape[1]] |= part << (plane * bits)
    return packed


def _unpack(packed: Tensor, length: int, bits: int) -> Tensor:
    planes = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.cat(planes, dim=1)[:, :length]


# ---- bytes ----


def _rows(segment: Tensor, spec: QuantizationSpec) -> list[Tensor]:
    """The full blocks of a segment as a matrix, and a partial last block as another."""
    full = segment.numel() // spec.block_length * spec.block_length
    rows = [segment[:full].view(-1, spec.block_length), segment[full:].view(1, -1)]
    return [part for part in rows if part.numel()]


def _view(encoded: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    return encoded[start : start + numel * dtype.itemsize].view(dtype)


def _write(out: Tensor, start: int, part: Tensor) -> None:
    out[start : start + part.numel()] = part
