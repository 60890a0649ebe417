# mypy: ignore-errors
"""The loops over CTF text, compiled by numba. They hold no lock: threads run them side by side.

They report the first wrong token of a sequence as its kind, the offset of the token and one number
more. `torchmn.cntk.readers.ctf_parse` has the kinds and the arrays. numba's cache beside this file
names that module: empty it when the module is renamed.
"""

import numpy as np
from numba import njit

from torchmn.cntk.readers.ctf_parse import (
    DUPLICATE_INDEX,
    INDEX_TOO_LARGE,
    NO_NAME,
    NOT_A_NUMBER,
    NOT_A_PAIR,
    NOT_A_SAMPLE,
    OUT_OF_RANGE,
    STREAM_MISSING,
    TOO_FEW,
    TOO_LARGE_FOR_FLOAT32,
    TOO_MANY,
    UNEXPECTED_ID,
)

_entry = njit(nogil=True, cache=True, error_model="numpy")
_inner = njit(
    nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, inline="never"
)

_TAB, _NEWLINE, _RETURN, _SPACE = 9, 10, 13, 32
_HASH, _PLUS, _MINUS, _POINT, _ZERO, _NINE, _COLON = 35, 43, 45, 46, 48, 57, 58
_UPPER_E, _LOWER_E, _BAR = 69, 101, 124
_POWERS = np.array([float(f"1e{k}") for k in range(309)])
_BLOCK = 64
_MANTISSA_LIMIT = np.uint64(10**18)


@_inner
def _at(text, p):
    """A byte; p is not negative, which saves a test."""
    return text[np.uint64(p)]


@_inner
def _is_blank(c):
    return c in (_SPACE, _TAB, _RETURN)


@_inner
def _ends_token(c):
    return c in (_SPACE, _TAB, _RETURN, _NEWLINE, _BAR)


@_inner
def _stream_at(text, p, end, names, bounds):
    """The stream whose name is at p, and the end of the name; -1 for an unknown one."""
    q = p
    while q < end and not _ends_token(_at(text, q)):
        q += 1
    for s in range(bounds.size - 1):
        if bounds[s + 1] - bounds[s] == q - p:
            same = True
            for k in range(q - p):
                if names[bounds[s] + k] != text[p + k]:
                    same = False
                    break
            if same:
                return s, q
    return -1, q


@_inner
def _next_special(text, p, end):
    """The next bar or end of a line from p on. Whole blocks without one are passed at once."""
    while p + _BLOCK <= end:
        found = np.uint8(0)
        for k in range(_BLOCK):
            c = _at(text, p + k)
            found |= np.uint8(c == _BAR) | np.uint8(c == _NEWLINE)
        if found:
            break
        p += _BLOCK
    while p < end and _at(text, p) != _BAR and _at(text, p) != _NEWLINE:
        p += 1
    return p


@_entry
def scan(text, inputs, with_ids, begins, lines, ids, counts):
    """Find the sequences of whole lines; returns their number and that of the lines.

    Writes where each begins, its line from 0, its id and its samples by stream. Stops where the
    arrays are full, with -1 as the number.
    """
    names, bounds = inputs.names, inputs.bounds
    num_streams = bounds.size - 1
    n, line = 0, 0
    p, end = 0, text.size
    last_id = np.uint64(0)
    while p < end:
        start = p
        has_id = False
        number = np.uint64(0)
        while p < end and _is_blank(_at(text, p)):
            p += 1
        while p < end and _ZERO <= _at(text, p) <= _NINE:
            number = number * np.uint64(10) + np.uint64(_at(text, p) - _ZERO)
            has_id = True
            p += 1
        after_id = p
        begins_sequence = not with_ids or n == 0 or (has_id and number != last_id)
        row = n if begins_sequence else n - 1
        if row >= begins.size:
            return -1, line
        if begins_sequence:
            for s in range(num_streams):
                counts[row, s] = 0
        p = _next_special(text, p, end)
        is_ignored = not has_id  # blank, or comments only
        if is_ignored:
            for k in range(after_id, p):
                is_ignored &= _is_blank(_at(text, k))
        while p < end and _at(text, p) == _BAR:
            p += 1
            if p >= end or _at(text, p) != _HASH:
                is_ignored = False
                s, p = _stream_at(text, p, end, names, bounds)
                if s >= 0:
                    counts[row, s] += 1
            p = _next_special(text, p, end)
        p += 1
        if begins_sequence and not is_ignored:
            begins[n], lines[n], ids[n] = start, line, number
            last_id = number
            n += 1
        line += 1
    return n, line


@_inner
def _number(text, p, end):
    """The decimal number at p: value, where it ends, whether it is one. It ends with its token."""
    start = p
    negative = p < end and _at(text, p) == _MINUS
    if negative:
        p += 1
    mantissa = np.int64(0)
    first = p
    while p < end and _ZERO <= _at(text, p) <= _NINE:
        mantissa = mantissa * 10 + (_at(text, p) - _ZERO)
        p += 1
    digits, decimals = p - first, 0
    if p < end and _at(text, p) == _POINT:
        p += 1
        first = p
        while p < end and _ZERO <= _at(text, p) <= _NINE:
            mantissa = mantissa * 10 + (_at(text, p) - _ZERO)
            p += 1
        decimals = p - first
    if 0 < digits + decimals <= 18 and (p >= end or _ends_token(_at(text, p))):
        value = float(mantissa) / _POWERS[np.uint64(decimals)]
        return (-value if negative else value), p, True
    return _any_number(text, start, end)


@_inner
def _any_number(text, p, end):
    """`_number` for the other forms: with a plus sign, an exponent or many digits."""
    negative = False
    if p < end and (_at(text, p) == _PLUS or _at(text, p) == _MINUS):
        negative = _at(text, p) == _MINUS
        p += 1
    mantissa, power, digits = np.uint64(0), 0, 0
    while p < end and _ZERO <= _at(text, p) <= _NINE:
        if mantissa < _MANTISSA_LIMIT:
            mantissa = mantissa * np.uint64(10) + np.uint64(_at(text, p) - _ZERO)
        else:
            power += 1
        digits += 1
        p += 1
    if p < end and _at(text, p) == _POINT:
        p += 1
        while p < end and _ZERO <= _at(text, p) <= _NINE:
            if mantissa < _MANTISSA_LIMIT:
                mantissa = mantissa * np.uint64(10) + np.uint64(_at(text, p) - _ZERO)
                power -= 1
            digits += 1
            p += 1
    if digits == 0:
        return 0.0, p, False
    if p < end and (_at(text, p) == _LOWER_E or _at(text, p) == _UPPER_E):
        p += 1
        below = False
        if p < end and (_at(text, p) == _PLUS or _at(text, p) == _MINUS):
            below = _at(text, p) == _MINUS
            p += 1
        exponent, exponent_digits = 0, 0
        while p < end and _ZERO <= _at(text, p) <= _NINE:
            if exponent < 100000:
                exponent = exponent * 10 + (_at(text, p) - _ZERO)
            exponent_digits += 1
            p += 1
        if exponent_digits == 0:
            return 0.0, p, False
        power += -exponent if below else exponent
    if p < end and not _ends_token(_at(text, p)):
        return 0.0, p, False
    value = float(mantissa)
    if mantissa != 0 and power != 0:
        if power < 0:
            if power < -308:  # in two steps, for the second may be below the smallest power
                value /= _POWERS[308]
                power = max(power + 308, -308)
            value /= _POWERS[-power]
        else:
            value = value * _POWERS[power] if power <= 308 else np.inf
    return (-value if negative else value), p, True


@_entry
def parse(text, begins, indices, places, may_have_ids, inputs, fill, samples):
    """Parse sequences of a chunk, each to its place in a minibatch; returns whether one is wrong.

    Sequence ``indices[k]`` begins at ``begins[indices[k]]``, ends where the next one begins, and is
    number ``places[k]`` of the minibatch, whose memory is ``samples`` (see `ctf_parse.Samples`).
    Pairs are in the order in which they are parsed.
    """
    names, bounds, is_sparse, dims = inputs
    first_rows, starts, dense, pair_values, pair_columns, num_pairs, row_pairs, error = samples
    num_streams = dims.size
    rows = np.zeros(num_streams, np.int64)
    for which in range(indices.size):
        i = places[which]
        rows[:] = 0
        p, end = begins[indices[which]], begins[indices[which] + 1]
        start = p
        kind, at, number = 0, p, 0
        while p < end and kind == 0:  # lines
            while p < end and _is_blank(_at(text, p)):
                p += 1
            if p < end and _ZERO <= _at(text, p) <= _NINE:
                if not may_have_ids:
                    kind, at = UNEXPECTED_ID, p
                    break
                while p < end and _ZERO <= _at(text, p) <= _NINE:
                    p += 1
            while p < end and _at(text, p) != _NEWLINE:  # samples
                c = _at(text, p)
                if _is_blank(c):
                    p += 1
                    continue
                if c != _BAR:
                    kind, at = NOT_A_SAMPLE, p
                    break
                bar = p
                p += 1
                if p < end and _at(text, p) == _HASH:
                    p = _next_special(text, p, end)
                    continue
                if p >= end or _ends_token(_at(text, p)):
                    kind, at = NO_NAME, bar
                    break
                s, p = _stream_at(text, p, end, names, bounds)
                if s < 0:
                    p = _next_special(text, p, end)
                    continue
                dim = dims[s]
                if is_sparse[s]:
                    first = num_pairs[s]
                    k = first
                    is_sorted = True
                    last = -1
                    while p < end:
                        c = _at(text, p)
                        if _is_blank(c):
                            p += 1
                            continue
                        if c in (_NEWLINE, _BAR):
                            break
                        token = p
                        column, digits = 0, 0
                        while p < end and _ZERO <= _at(text, p) <= _NINE:
                            if column < 1 << 40:
                                column = column * 10 + (_at(text, p) - _ZERO)
                            digits += 1
                            p += 1
                        if digits == 0 or p >= end or _at(text, p) != _COLON:
                            kind, at = NOT_A_PAIR, token
                            break
                        if column >= dim:
                            kind, at, number = INDEX_TOO_LARGE, token, dim
                            break
                        p += 1
                        if (
                            p + 1 < end
                            and _ZERO <= _at(text, p) <= _NINE
                            and _at(text, p + 1) == _SPACE
                        ):
                            value = float(_at(text, p) - _ZERO)  # 1, as in most pairs
                            p += 2
                        else:
                            value, p, is_number = _number(text, p, end)
                            if not is_number:
                                kind, at = NOT_A_PAIR, token
                                break
                        if abs(value) >= TOO_LARGE_FOR_FLOAT32:
                            kind, at = OUT_OF_RANGE, token
                            break
                        pair_values[k] = value
                        pair_columns[k] = column
                        k += 1
                        is_sorted &= column > last
                        last = column
                    if kind:
                        break
                    if not is_sorted:
                        order = np.argsort(pair_columns[first:k])
                        columns = pair_columns[first:k][order]
                        values = pair_values[first:k][order]
                        for j in range(1, columns.size):
                            if columns[j] == columns[j - 1]:
                                kind, at, number = DUPLICATE_INDEX, bar, columns[j]
                                break
                        if kind:
                            break
                        pair_columns[first:k] = columns
                        pair_values[first:k] = values
                    num_pairs[s] = k
                    row = starts[s] + first_rows[i, s] + rows[s]
                    row_pairs[row, 0], row_pairs[row, 1] = first, k
                else:
                    base = starts[s] + (first_rows[i, s] + rows[s]) * dim
                    k = 0
                    while p < end:
                        c = _at(text, p)
                        if _is_blank(c):
                            p += 1
                            continue
                        if c in (_NEWLINE, _BAR):
                            break
                        token = p
                        if _ZERO <= c <= _NINE and p + 1 < end and _at(text, p + 1) == _SPACE:
                            value = float(c - _ZERO)  # one digit, as most pixels are
                            p += 2
                        else:
                            value, p, is_number = _number(text, token, end)
                            if not is_number:
                                kind, at = NOT_A_NUMBER, token
                                break
                            if abs(value) >= TOO_LARGE_FOR_FLOAT32:
                                kind, at = OUT_OF_RANGE, token
                                break
                        if k == dim:
                            kind, at, number = TOO_MANY, token, dim
                            break
                        dense[np.uint64(base + k)] = value
                        k += 1
                    if kind:
                        break
                    if k < dim:
                        if not fill:
                            kind, at, number = TOO_FEW, bar, k
                            break
                        dense[base + k : base + dim] = 0
                rows[s] += 1
            p += 1
        if kind == 0:
            for s in range(num_streams):
                if rows[s] == 0:
                    kind, at, number = STREAM_MISSING, start, s
                    break
        if kind:
            error[0], error[1], error[2] = kind, at, number
            return True
    return False


@_entry
def csr(pair_values, pair_columns, row_pairs):
    """Rows that lie anywhere among the pairs as a CSR matrix: its row bounds, columns, values."""
    crow = np.empty(row_pairs.shape[0] + 1, np.int64)
    crow[0] = 0
    for row in range(row_pairs.shape[0]):
        crow[row + 1] = crow[row] + row_pairs[row, 1] - row_pairs[row, 0]
    columns = np.empty(crow[-1], np.int64)
    values = np.empty(crow[-1], np.float32)
    for row in range(row_pairs.shape[0]):
        first, to = row_pairs[row, 0], crow[row]
        for k in range(crow[row + 1] - to):
            columns[to + k] = pair_columns[first + k]
            values[to + k] = pair_values[first + k]
    return crow, columns, values
