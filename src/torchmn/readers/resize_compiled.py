# mypy: ignore-errors
"""Parts of JPEG images, resized; compiled by numba. `photo_parts` says what for.

The weights are those of torchvision and Pillow: bilinear, over as many pixels as make one.
Colours are those of `jpeg_compiled`.
"""

from __future__ import annotations

import math

import numpy as np

from torchmn.readers.jpeg_compiled import GREEN, RED, compiled, inner

_WEIGHT_BITS = 13  # and 8 of a channel: they fill its field
_CHUNK = 32  # rows are computed up to a multiple, so that no pixel is computed without vectors
_HALVES = (1 | 1 << GREEN | 1 << RED) << (_WEIGHT_BITS - 1)
_BYTES = 255 | 255 << GREEN | 255 << RED


@inner
def _weights(size, num):
    """For each of ``num`` places, the first of the pixels it is made of, and their weights."""
    scale = size / num
    support = max(scale, 1.0)
    taps = min(math.ceil(2 * support), size)
    begins, weights = np.empty(num, np.int64), np.zeros((num, taps), np.uint64)
    raw = np.empty(taps)
    for n in range(num):
        center = scale * (n + 0.5)
        begin = max(int(center - support + 0.5), 0)
        begin = min(begin, size - taps)
        total = 0.0
        for k in range(taps):
            raw[k] = max(support - abs(begin + k + 0.5 - center), 0.0)
            total += raw[k]
        begins[n] = begin
        scale_of_weights = (1 << _WEIGHT_BITS) / total
        for k in range(taps):
            weights[n, k] = np.uint64(raw[k] * scale_of_weights + 0.5)
    return begins, weights


@inner
def _rounded(value):
    return ((value + np.uint64(_HALVES)) >> np.uint64(_WEIGHT_BITS)) & np.uint64(_BYTES)


@inner
def _round(line):
    for x in range(line.size):
        line[x] = _rounded(line[x])


@inner
def _down(rows, begin, weights, line):
    """A row that is the weighted sum of rows from ``begin`` on."""
    source, weight = rows[begin], weights[0]
    for x in range(line.size):
        line[x] = source[x] * weight
    for k in range(1, weights.size):
        source, weight = rows[begin + k], weights[k]
        if weight:
            for x in range(line.size):
                line[x] += source[x] * weight


@inner
def _across(source, begins, weights, num, line):
    """A row each of whose places is the weighted sum of ``num`` neighbours in another row."""
    one, two, three = np.uint64(1), np.uint64(2), np.uint64(3)
    if num == 2:  # loops over few weights are written out
        for x in range(begins.size):
            n, w = np.uint64(begins[x]), np.uint64(2 * x)
            line[x] = source[n] * weights[w] + source[n + one] * weights[w + one]
    elif num == 3:
        for x in range(begins.size):
            n, w = np.uint64(begins[x]), np.uint64(3 * x)
            color = source[n] * weights[w] + source[n + one] * weights[w + one]
            line[x] = color + source[n + two] * weights[w + two]
    elif num == 4:
        for x in range(begins.size):
            n, w = np.uint64(begins[x]), np.uint64(4 * x)
            color = source[n] * weights[w] + source[n + one] * weights[w + one]
            color += source[n + two] * weights[w + two]
            line[x] = color + source[n + three] * weights[w + three]
    else:
        for x in range(begins.size):
            n, w = np.uint64(begins[x]), np.uint64(num * x)
            color = np.uint64(0)
            for k in range(num):
                color += source[n + np.uint64(k)] * weights[w + np.uint64(k)]
            line[x] = color


@inner
def _write(line, into):
    """Blue, green, red, 0 as the bytes of each number."""
    for x in range(into.size):
        color = _rounded(line[x])
        green, red = color >> np.uint64(GREEN - 8), color >> np.uint64(RED - 16)
        green, red = green & np.uint64(0xFF00), red & np.uint64(0xFF0000)
        into[x] = np.uint32((color & np.uint64(0xFF)) | green | red)


@compiled
def resize(colors, width, is_mirrored, into):
    """Resize the first ``width`` colours of each row to an image (rows, columns, 3)."""
    height, rows, columns = colors.shape[0], into.shape[0], into.shape[1]
    down, down_weights = _weights(height, rows)
    across, across_weights = _weights(width, columns)
    if is_mirrored:
        across, across_weights = across[::-1].copy(), across_weights[::-1].copy()
    num = across_weights.shape[1]
    flat_weights = across_weights.reshape(across_weights.size)
    resized = np.empty((rows, columns), np.uint32)
    last = np.empty((columns + _CHUNK - 1) // _CHUNK * _CHUNK, np.uint64)
    if height < rows:  # the width first, for there are fewer rows now
        wide = np.empty((height, last.size), np.uint64)
        for y in range(height):
            _across(colors[y], across, flat_weights, num, wide[y])
            _round(wide[y])
        for y in range(rows):
            _down(wide, down[y], down_weights[y], last)
            _write(last, resized[y])
    else:
        line = np.empty(colors.shape[1], np.uint64)
        for y in range(rows):
            _down(colors, down[y], down_weights[y], line)
            _round(line)
            _across(line, across, flat_weights, num, last)
            _write(last, resized[y])
    _pack(resized.reshape(resized.size), into.reshape(into.size))


@inner
def _pack(colors, into):
    """Three bytes of each number. Four at once, for single bytes take eight times as long."""
    if into.size % 4 == 0:
        numbers = into.view(np.uint32)
        for i in range(numbers.size // 3):
            a, b, c, d = colors[4 * i], colors[4 * i + 1], colors[4 * i + 2], colors[4 * i + 3]
            numbers[3 * i] = a | (b << np.uint32(24))
            numbers[3 * i + 1] = (b >> np.uint32(8)) | (c << np.uint32(16))
            numbers[3 * i + 2] = (c >> np.uint32(16)) | (d << np.uint32(8))
    else:
        for i in range(colors.size):
            into[3 * i] = colors[i]
            into[3 * i + 1] = colors[i] >> np.uint32(8)
            into[3 * i + 2] = colors[i] >> np.uint32(16)
