"""Find steps in a file of records, where they are in order, without reading all of it."""

import math
import re
from bisect import bisect_left
from pathlib import Path
from typing import BinaryIO

# Not of other lines: values that the script reports have any number of step, such as an epoch's.
STEP = re.compile(rb'\n\{"type":\s*"Step",\s*"step":\s*(\d+)')
MEMORY = re.compile(rb'\n[^\n]{0,40}?"Memory"')
_BLOCK = 1 << 13


def step_range(path: Path) -> tuple[int, int] | None:
    """Return the first and the last step of a file, None if it has no step."""
    with path.open("rb") as file:
        first = _next_step(file, 0)
        found = STEP.findall(b"\n" + tail(file))
    if first is None:
        return None
    return first[1], max(int(found[-1]), first[1]) if found else first[1]


def tail(
    file: BinaryIO, wanted: re.Pattern[bytes] = STEP, *, max_nbytes: float = math.inf
) -> bytes:
    """Return the last whole lines of a file, enough to include a wanted one if it has one.

    From ``max_nbytes`` on it is not looked for any further.
    """
    size = file.seek(0, 2)
    length = _BLOCK
    while True:
        file.seek(max(0, size - length))
        text = file.read(length)
        whole = text if length >= size else text[text.find(b"\n") + 1 :]
        whole = whole[: whole.rfind(b"\n") + 1]
        if length >= min(size, max_nbytes) or wanted.search(b"\n" + whole):
            return whole
        length *= 4


def _next_step(file: BinaryIO, offset: int) -> tuple[int, int] | None:
    """Return offset and step of the first whole line with a step at or after ``offset``."""
    # A line that begins at the offset counts, so the byte before it is read too.
    file.seek(max(0, offset - 1))
    text = b"\n" if offset == 0 else b""
    base = offset - 1
    while True:
        match = STEP.search(text)
        # a number at the end of what was read may continue
        if match and match.end() < len(text):
            return base + match.start() + 1, int(match[1])
        more = file.read(_BLOCK)
        if not more:
            return None
        text += more


def seek(file: BinaryIO, target: int) -> None:
    """Seek to a line shortly before those of step ``target``, or to the beginning of the file."""

    def step_after(block: int) -> int:
        found = _next_step(file, block * _BLOCK)
        return target if found is None else found[1]

    blocks = range(file.seek(0, 2) // _BLOCK + 1)
    first = bisect_left(blocks, target, key=step_after)  # which has no earlier step after its begin
    before = _next_step(file, (first - 1) * _BLOCK) if first else None
    file.seek(0 if before is None else before[0])
