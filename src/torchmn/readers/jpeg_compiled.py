# mypy: ignore-errors
"""A decoder of parts of JPEG images, compiled by numba. `photo_parts` says what it is for.

ITU-T T.81 for the code. The inverse transform, the upsampling and the conversion of colours are the
integer arithmetic of libjpeg (jidctint.c, jdsample.c and jdcolor.c of version 6b), as in
libjpeg-turbo, so that the pixels are the same bit by bit.

Only blocks in or beside the part are transformed; codes of the others are passed, and none is read
after the last block of the part. What is rare or damaged is left to another decoder.

All is in one file: numba, which keeps the machine code, looks at the date of this one only.
"""

from __future__ import annotations

import numpy as np
from numba import njit

compiled = njit(nogil=True, cache=True, error_model="numpy")
inner = njit(
    nogil=True,
    error_model="numpy",
    forceinline=True,
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
)

# Markers
_SOF_BASELINE, _SOF_EXTENDED, _DHT, _SOI, _EOI = 0xC0, 0xC1, 0xC4, 0xD8, 0xD9
_SOS, _DQT, _DRI, _APP0, _APP14, _COM = 0xDA, 0xDB, 0xDD, 0xE0, 0xEE, 0xFE

# Codes are looked up by their first bits. An entry has the number of bits of the code and its value
# together, the number of bits of the value, and how many coefficients it advances by.
_LOOKUP_BITS = 9
_SIZE, _ADVANCE = 8, 12
_END_OF_BLOCK = 64
_NO_ENTRY = 0
_MAX_SIZE = 11  # of a value, in bits; so a code and its value have at most 27

# Blocks that are transformed at once. Their coefficients are neighbours, for vector instructions.
_LANES = 16
_ROW = 8 * _LANES
# Where a coefficient is in its block. The end of a block counts as a zero after the last one.
_ZIGZAG = np.full(64 + _END_OF_BLOCK, 63 * _LANES, np.int64)
_ZIGZAG[:64] = _LANES * np.array(
    sorted(range(64), key=lambda k: (k // 8 + k % 8, k // 8 if (k // 8 + k % 8) % 2 else k % 8))
)

_COPIED_BYTES = 32
_SPARE_BYTES = 512  # more than the codes of a block

# Rows are computed up to a multiple of this, so that no pixel is computed without vectors.
_CHUNK = 32

# A colour has blue, green and red as fields of 21 bits: one multiplication weighs all three.
GREEN, RED = 21, 42
_GREY = 1 | 1 << GREEN | 1 << RED


@inner
def _word(data, p):
    """Two bytes, the more significant one first."""
    return (np.int64(data[p]) << 8) | np.int64(data[p + 1])


@inner
def _build(data, p, end, lookup, limits, firsts, symbols):
    """Read a Huffman table at p and return what follows it; -1 if it is wrong.

    Codes of n bits are less than ``limits[n]``, shifted to 16 bits, and the symbol of the code c is
    ``symbols[c - firsts[n]]``.
    """
    if p + 16 > end:
        return -1
    total = 0
    for n in range(16):
        total += np.int64(data[p + n])
    if total > 256 or p + 16 + total > end:
        return -1
    lookup[:] = _NO_ENTRY
    code, index = 0, 0
    for n in range(1, 17):
        count = np.int64(data[p + n - 1])
        firsts[n] = code - index
        for _ in range(count):
            if code >= 1 << n:
                return -1
            symbol = np.int64(data[p + 16 + index])
            if symbol & 15 > _MAX_SIZE:
                return -1
            symbols[index] = symbol
            if n <= _LOOKUP_BITS:
                spare = _LOOKUP_BITS - n
                lookup[code << spare : (code + 1) << spare] = _entry_of(symbol, n)
            code += 1
            index += 1
        limits[n] = code << (16 - n)
        code <<= 1
    return p + 16 + total


@inner
def _entry_of(symbol, bits):
    """The entry of a code that has ``bits`` bits and stands for a symbol."""
    size, run = symbol & 15, symbol >> 4
    advance = run + 1 if size or run == 15 else _END_OF_BLOCK
    return (advance << _ADVANCE) | (size << _SIZE) | (bits + size)


@inner
def _value(bits, entry):
    """The signed number after the code of an entry."""
    used, size = np.uint64(entry & 63), np.uint64((entry >> _SIZE) & 15)
    after = bits << np.uint64(used - size)
    value = np.int64((after >> np.uint64(1)) >> np.uint64(np.uint64(63) - size))
    is_negative = np.int64(np.uint64(1) - (after >> np.uint64(63)))
    return value - is_negative * ((np.int64(1) << np.int64(size)) - 1)


@inner
def _entry(bits, lookup, limits, firsts, symbols):
    """The entry of the next code; 0 if there is none."""
    entry = np.int64(lookup[bits >> np.uint64(64 - _LOOKUP_BITS)])
    if entry == _NO_ENTRY:
        code = np.int64(bits >> np.uint64(48))
        for n in range(_LOOKUP_BITS + 1, 17):
            if code < limits[n]:
                index = (code >> (16 - n)) - firsts[n]
                return _entry_of(np.int64(symbols[index & 255]), n)
    return entry


@inner
def _unstuffed(data, p, stream):
    """Copy the codes of a scan without the zeros after bytes 255; returns their number, or -1.

    The end of the image must follow. Zeros for a block are added.
    """
    end, n = data.size, 0
    while True:
        while p + _COPIED_BYTES <= end:
            found = np.uint8(0)
            for k in range(_COPIED_BYTES):
                byte = data[np.uint64(p + k)]
                stream[np.uint64(n + k)] = byte
                found |= np.uint8(byte == 0xFF)
            if found:
                break
            p += _COPIED_BYTES
            n += _COPIED_BYTES
        while p < end and data[np.uint64(p)] != 0xFF:
            stream[np.uint64(n)] = data[np.uint64(p)]
            p += 1
            n += 1
        if p + 1 >= end:
            return -1
        if data[p + 1] == _EOI:
            stream[n : n + _SPARE_BYTES] = 0
            return n
        if data[p + 1]:
            return -1
        stream[n] = 0xFF
        p += 2
        n += 1


@inner
def _fill(stream, p, bits, have):
    """At least 56 bits, the next one first. ``have`` counts them, and p is the byte after."""
    q = np.uint64(p)
    word = (
        (np.uint64(stream[q]) << np.uint64(56))
        | (np.uint64(stream[q + np.uint64(1)]) << np.uint64(48))
        | (np.uint64(stream[q + np.uint64(2)]) << np.uint64(40))
        | (np.uint64(stream[q + np.uint64(3)]) << np.uint64(32))
        | (np.uint64(stream[q + np.uint64(4)]) << np.uint64(24))
        | (np.uint64(stream[q + np.uint64(5)]) << np.uint64(16))
        | (np.uint64(stream[q + np.uint64(6)]) << np.uint64(8))
        | np.uint64(stream[q + np.uint64(7)])
    )
    return p + ((63 - have) >> 3), bits | (word >> np.uint64(have)), have | 56


@inner
def _times(a, b):
    return np.int32(np.int32(a) * np.int32(b))


@inner
def _plus(a, b):
    return np.int32(np.int32(a) + np.int32(b))


@inner
def _minus(a, b):
    return np.int32(np.int32(a) - np.int32(b))


@inner
def _shifted(value, shift):
    """Over ``2**shift``, rounded."""
    return np.int32(_plus(value, 1 << (shift - 1)) >> np.int32(shift))


@inner
def _inverse(a, b, c, d, e, f, g, h):
    """The inverse cosine transform of eight numbers, times ``2**13``. All is modulo ``2**32``."""
    z = _times(_plus(c, g), 4433)
    e2, e3 = _plus(z, _times(g, -15137)), _plus(z, _times(c, 6270))
    e0, e1 = _times(_plus(a, e), 8192), _times(_minus(a, e), 8192)
    s0, s3, s1, s2 = _plus(e0, e3), _minus(e0, e3), _plus(e1, e2), _minus(e1, e2)
    z3, z4 = _plus(h, d), _plus(f, b)
    z5 = _times(_plus(z3, z4), 9633)
    z1, z2 = _times(_plus(h, b), -7373), _times(_plus(f, d), -20995)
    z3, z4 = _plus(_times(z3, -16069), z5), _plus(_times(z4, -3196), z5)
    t0 = _plus(_times(h, 2446), _plus(z1, z3))
    t1 = _plus(_times(f, 16819), _plus(z2, z4))
    t2 = _plus(_times(d, 25172), _plus(z2, z3))
    t3 = _plus(_times(b, 12299), _plus(z1, z4))
    return (
        _plus(s0, t3),
        _plus(s1, t2),
        _plus(s2, t1),
        _plus(s3, t0),
        _minus(s3, t0),
        _minus(s2, t1),
        _minus(s1, t2),
        _minus(s0, t3),
    )


@inner
def _pixels(a, b, c, d, e, f, g, h):
    """Eight neighbours as one number."""
    return (
        _pixel(a)
        | (_pixel(b) << np.uint64(8))
        | (_pixel(c) << np.uint64(16))
        | (_pixel(d) << np.uint64(24))
        | (_pixel(e) << np.uint64(32))
        | (_pixel(f) << np.uint64(40))
        | (_pixel(g) << np.uint64(48))
        | (_pixel(h) << np.uint64(56))
    )


@inner
def _pixel(value):
    value = _plus(_shifted(value, 18), 128)
    return np.uint64(min(max(value, np.int32(0)), np.int32(255)))


@inner
def _transform(blocks, num, pixels, places, steps, planes):
    """Write ``num`` blocks of pixels to their places, and make the coefficients zero.

    ``planes`` has eight pixels in a number.
    """
    for k in range(8):
        n = k * _LANES
        for i in range(n, n + _LANES):
            a, b, c, d, e, f, g, h = _inverse(
                blocks[i], blocks[i + _ROW], blocks[i + 2 * _ROW], blocks[i + 3 * _ROW],
                blocks[i + 4 * _ROW], blocks[i + 5 * _ROW], blocks[i + 6 * _ROW],
                blocks[i + 7 * _ROW],
            )  # fmt: skip
            blocks[i], blocks[i + _ROW] = _shifted(a, 11), _shifted(b, 11)
            blocks[i + 2 * _ROW], blocks[i + 3 * _ROW] = _shifted(c, 11), _shifted(d, 11)
            blocks[i + 4 * _ROW], blocks[i + 5 * _ROW] = _shifted(e, 11), _shifted(f, 11)
            blocks[i + 6 * _ROW], blocks[i + 7 * _ROW] = _shifted(g, 11), _shifted(h, 11)
    for k in range(8):
        n = k * _ROW
        for i in range(_LANES):
            j = n + i
            a, b, c, d, e, f, g, h = _inverse(
                blocks[j], blocks[j + _LANES], blocks[j + 2 * _LANES], blocks[j + 3 * _LANES],
                blocks[j + 4 * _LANES], blocks[j + 5 * _LANES], blocks[j + 6 * _LANES],
                blocks[j + 7 * _LANES],
            )  # fmt: skip
            pixels[k * _LANES + i] = _pixels(a, b, c, d, e, f, g, h)
    blocks[:] = 0
    for i in range(num):
        for k in range(8):
            planes[places[i] + k * steps[i]] = pixels[k * _LANES + i]


@inner
def _window(top, left, height, width, rows, columns, v, h):
    """The first and last row, and first and last column, of the blocks that a plane needs."""
    margin = 1 if h > 1 or v > 1 else 0  # upsampling weighs neighbours
    y0, y1 = max(top // v - margin, 0), min((top + height - 1) // v + margin, (rows - 1) // v)
    x0, x1 = max(left // h - margin, 0), min((left + width - 1) // h + margin, (columns - 1) // h)
    return y0 // 8, y1 // 8, x0 // 8, x1 // 8


@inner
def _segments(data, quantization, codes, frame):
    """Read what is before the scan. Returns where that begins, or 0: another kind, or damaged.

    ``frame`` becomes rows, columns, planes, samples of the first plane for one of the others down
    and across, and for each plane the numbers of its quantization, DC and AC tables.
    """
    lookups, limits, firsts, symbols = codes
    end = data.size
    if end < 2 or data[0] != 0xFF or data[1] != _SOI:
        return 0
    has_jfif = False
    p = 2
    ids = np.zeros(3, np.int64)
    have_quantization = 0
    have_codes = 0
    num = 0
    while p + 4 <= end:
        if data[p] != 0xFF:
            return 0
        marker, length = np.int64(data[p + 1]), _word(data, p + 2)
        q, stop = p + 4, p + 2 + length
        if length < 2 or stop > end:
            return 0
        if marker == _APP0:
            has_jfif |= length >= 7 and data[q] == 0x4A and data[q + 1] == 0x46
        elif marker == _DQT:
            while q < stop:
                number = np.int64(data[q])
                if number > 3 or q + 65 > stop:
                    return 0
                for k in range(64):
                    quantization[number, k] = data[q + 1 + k]
                have_quantization |= 1 << number
                q += 65
        elif marker == _DHT:
            while q < stop:
                kind = np.int64(data[q])
                number = (kind & 15) + 2 * (kind >> 4)
                if kind & 0xEE:
                    return 0
                q = _build(
                    data, q + 1, stop, lookups[number], limits[number], firsts[number],
                    symbols[number],
                )  # fmt: skip
                if q < 0:
                    return 0
                have_codes |= 1 << number
        elif marker in (_SOF_BASELINE, _SOF_EXTENDED):
            if num or length < 8 or data[q] != 8:
                return 0
            num = np.int64(data[q + 5])
            if num not in (1, 3) or length != 8 + 3 * num:
                return 0
            frame[0], frame[1], frame[2] = _word(data, q + 1), _word(data, q + 3), num
            frame[3] = frame[4] = 1
            for k in range(num):
                at = q + 6 + 3 * k
                ids[k] = data[at]
                factors = np.int64(data[at + 1])
                if k == 0 and num == 3:
                    frame[3], frame[4] = factors & 15, factors >> 4
                elif k and factors != 0x11:
                    return 0
                if data[at + 2] > 3:
                    return 0
                frame[5 + k] = data[at + 2]
        elif marker == _SOS:
            if num == 0 or length != 6 + 2 * num or data[q] != num:
                return 0
            if num == 3 and not (has_jfif or (ids[0] == 1 and ids[1] == 2 and ids[2] == 3)):
                return 0
            for k in range(num):
                which = np.int64(data[q + 2 + 2 * k])
                if data[q + 1 + 2 * k] != ids[k] or which & 0xEE:
                    return 0
                frame[8 + k], frame[11 + k] = which >> 4, 2 + (which & 15)
                if not (have_codes >> frame[8 + k]) & (have_codes >> frame[11 + k]) & 1:
                    return 0
                if not (have_quantization >> frame[5 + k]) & 1:
                    return 0
            return stop
        elif marker == _APP14 and not has_jfif:
            return 0  # may be of other colours
        elif marker == _DRI:
            if length != 4 or _word(data, q):
                return 0
        elif not (_APP0 <= marker <= 0xEF or marker == _COM):
            return 0  # progressive, arithmetic, lossless
        p = stop
    return 0


@inner
def _table(codes, number):
    lookups, limits, firsts, symbols = codes
    return lookups[number], limits[number], firsts[number], symbols[number]


@inner
def _read_values(stream, p, bits, have, codes, number, table, blocks, lane):
    """Read the coefficients of a block after the first one, times their steps."""
    lookup, limits, firsts, symbols = _table(codes, number)
    c = 1
    while c < 64:
        p, bits, have = _fill(stream, p, bits, have)
        for _ in range(2):  # codes and their values, which have at most 54 bits
            if c < 64:
                entry = _entry(bits, lookup, limits, firsts, symbols)
                if entry == _NO_ENTRY:
                    return p, bits, have, False
                c += entry >> _ADVANCE
                place = np.uint64(c - 1)
                blocks[_ZIGZAG[place] + lane] = _value(bits, entry) * table[place]
                bits <<= np.uint64(entry & 63)
                have -= entry & 63
    return p, bits, have, True


@inner
def _pass_values(stream, p, bits, have, codes, number):
    """Find the end of a block."""
    lookup, limits, firsts, symbols = _table(codes, number)
    c = 1
    while c < 64:
        p, bits, have = _fill(stream, p, bits, have)
        for _ in range(2):
            if c < 64:
                entry = _entry(bits, lookup, limits, firsts, symbols)
                if entry == _NO_ENTRY:
                    return p, bits, have, False
                c += entry >> _ADVANCE
                bits <<= np.uint64(entry & 63)
                have -= entry & 63
    return p, bits, have, True


@inner
def _scan(data, p, quantization, codes, frame, windows, starts, planes):
    """Decode the blocks of the windows; returns whether the data are as they should be."""
    stream = np.empty(data.size - p + _SPARE_BYTES, np.uint8)
    size = _unstuffed(data, p, stream)
    if size < 0:
        return False
    num, v, h = frame[2], frame[3], frame[4]
    blocks, pixels = np.zeros(64 * _LANES, np.int32), np.empty(8 * _LANES, np.uint64)
    places, steps = np.zeros(_LANES, np.int64), np.zeros(_LANES, np.int64)
    lane = 0
    predictions = np.zeros(3, np.int64)
    p, bits, have = np.int64(0), np.uint64(0), np.int64(0)
    last_y = max(windows[0, 1] // v, windows[1, 1], windows[2, 1])
    last_x = max(windows[0, 3] // h, windows[1, 3], windows[2, 3])
    units = (frame[1] + 8 * h - 1) // (8 * h)
    for my in range(last_y + 1):
        for mx in range(units if my < last_y else last_x + 1):
            for n in range(v * h + num - 1):
                k, y, x = max(n - v * h + 1, 0), my, mx
                if k == 0:
                    y, x = my * v + (n >> (h - 1)), mx * h + (n & (h - 1))  # h is 1 or 2
                if p > size + 8:
                    return False
                p, bits, have = _fill(stream, p, bits, have)
                lookup, limits, firsts, symbols = _table(codes, frame[8 + k])
                entry = _entry(bits, lookup, limits, firsts, symbols)
                if entry == _NO_ENTRY:
                    return False
                predictions[k] += _value(bits, entry)
                bits <<= np.uint64(entry & 63)
                have -= entry & 63
                top, bottom, left, right = (
                    windows[k, 0],
                    windows[k, 1],
                    windows[k, 2],
                    windows[k, 3],
                )
                if top <= y <= bottom and left <= x <= right:
                    table = quantization[frame[5 + k]]
                    blocks[lane] = predictions[k] * table[0]
                    p, bits, have, good = _read_values(
                        stream, p, bits, have, codes, frame[11 + k], table, blocks, lane
                    )
                    steps[lane] = _step(windows, k)
                    places[lane] = starts[k] + 8 * (y - top) * steps[lane] + x - left + 1
                    lane += 1
                else:
                    p, bits, have, good = _pass_values(stream, p, bits, have, codes, frame[11 + k])
                if not good:
                    return False
                if lane == _LANES:
                    _transform(blocks, lane, pixels, places, steps, planes)
                    lane = 0
    _transform(blocks, lane, pixels, places, steps, planes)
    return 8 * p - have <= 8 * size


@inner
def _padded(size):
    return (size + _CHUNK - 1) // _CHUNK * _CHUNK


@inner
def _upsampled(near, other, is_between, begins, ends, size, red, sums, into):
    """Twice as many samples as ``size`` ones of blue, and of red from ``red`` on.

    The nearer sample has the weight 3/4, the other one 1/4. So has the nearer row, if the row of
    the picture is between two. The rows begin with the sample before. ``begins`` and ``ends``: the
    first and the last are neighbours that the picture does not have.
    """
    if is_between:
        for x in range(_padded(red + size + 2)):
            sums[x] = np.int16(np.int16(3) * np.int16(near[x]) + np.int16(other[x]))
    else:
        for x in range(_padded(red + size + 2)):
            sums[x] = np.int16(near[x])
    if begins:
        sums[0], sums[red] = sums[1], sums[red + 1]
    if ends:
        sums[size + 1], sums[red + size + 1] = sums[size], sums[red + size]
    up, down, shift = (8, 7, 4) if is_between else (1, 2, 2)
    up, down, shift = np.int16(up), np.int16(down), np.int16(shift)
    for x in range(_padded(red + size)):
        middle = np.int16(np.int16(3) * sums[x + 1])
        into[2 * x] = np.int16(np.int16(np.int16(middle + sums[x]) + up) >> shift)
        into[2 * x + 1] = np.int16(np.int16(np.int16(middle + sums[x + 2]) + down) >> shift)


@inner
def _clamped(value):
    return np.uint64(min(max(value, np.int32(0)), np.int32(255)))


@inner
def _convert(luma, blues, reds, width, colors):
    """The colours of a row, each in a number."""
    for x in range(_padded(width)):
        y = np.int32(luma[x])
        b, r = _minus(blues[x], 128), _minus(reds[x], 128)
        blue = _clamped(_plus(y, _shifted(_times(b, 116130), 16)))
        green = _plus(_times(b, -22554), _times(r, -46802))
        green = _clamped(_plus(y, _shifted(green, 16)))
        red = _clamped(_plus(y, _shifted(_times(r, 91881), 16)))
        colors[x] = blue | (green << np.uint64(GREEN)) | (red << np.uint64(RED))


@inner
def _row(samples, windows, starts, k, y, x):
    """The samples of a plane from a place on."""
    begin = 8 * (starts[k] + (y - 8 * windows[k, 0]) * _step(windows, k))
    return samples[begin + x - 8 * windows[k, 2] + 8 :]


@inner
def _width(windows, k):
    """Blocks of a row of a plane, with memory for one more on either side."""
    return windows[k, 3] - windows[k, 2] + 3


@inner
def _step(windows, k):
    """Blocks from a row to the next one: rows of the blue and the red plane take turns."""
    return _width(windows, k) * (2 if k else 1)


@compiled
def decode(data, top, left, height, width):
    """The colours of a part of an image; with no rows if another decoder is to be used.

    Blue, green and red are fields of a number. The rows may be longer than the part.
    """
    failed = np.empty((0, 0), np.uint64)
    quantization = np.zeros((4, 128), np.int64)
    codes = (
        np.empty((4, 1 << _LOOKUP_BITS), np.int32),
        np.empty((4, 17), np.int64),
        np.empty((4, 17), np.int64),
        np.zeros((4, 256), np.uint8),
    )
    frame = np.zeros(14, np.int64)
    p = _segments(data, quantization, codes, frame)
    rows, columns, num, v, h = frame[0], frame[1], frame[2], frame[3], frame[4]
    if p == 0 or min(rows, columns) < 16 or not 1 <= v <= h <= 2:
        return failed
    if min(top, left) < 0 or top + height > rows or left + width > columns:
        return failed
    windows = np.empty((3, 4), np.int64)
    for k in range(3):
        down, across = (v, h) if k else (1, 1)
        windows[k] = _window(top, left, height, width, rows, columns, down, across)
    starts = np.zeros(4, np.int64)
    starts[1] = 8 * (windows[0, 1] - windows[0, 0] + 1) * _step(windows, 0)
    starts[2] = starts[1] + _width(windows, 1)
    starts[3] = starts[1] + 8 * (windows[1, 1] - windows[1, 0] + 1) * _step(windows, 1)
    planes = np.empty(starts[3] + _CHUNK, np.uint64)
    if not _scan(data, p, quantization, codes, frame, windows, starts, planes):
        return failed
    samples = planes.view(np.uint8)
    x0, x1 = left // h, (left + width - 1) // h
    last_row, last_column = (rows - 1) // v, (columns - 1) // h
    size, red = x1 - x0 + 1, 8 * _width(windows, 1)
    sums = np.empty(_padded(red + size + 2) + _CHUNK, np.int16)
    chroma = np.empty(2 * sums.size, np.int16)
    blues, reds = chroma[left % h :], chroma[h * red + left % h :]
    colors = np.empty((height, _padded(width)), np.uint64)
    for y in range(top, top + height):
        luma = _row(samples, windows, starts, 0, y, left)
        if num == 1:
            for x in range(width):
                colors[y - top, x] = np.uint64(luma[x]) * np.uint64(_GREY)
            continue
        if h == 1:
            chroma[: red + size] = _row(samples, windows, starts, 1, y, left)[: red + size]
        else:
            near = y // v
            other = min(max(near - 1 + 2 * (y % 2), 0), last_row)
            _upsampled(
                _row(samples, windows, starts, 1, near, x0 - 1),
                _row(samples, windows, starts, 1, other, x0 - 1),
                v == 2, x0 == 0, x1 == last_column, size, red, sums, chroma,
            )  # fmt: skip
        _convert(luma, blues, reds, width, colors[y - top])
    return colors
