"""Find steps in a file of records, where they are in order, without reading all of it."""

import math
import re
from pathlib import Path
from typing import BinaryIO

# Not of other lines: values that the script reports have any number of step, such as an epoch's.
STEP = re.compile(rb'\n\{"type":\s*"Step",\s*"step":\s*(\d+)')
MEMORY = re.compile(rb'\n[^\n]{0,40}?"Memory"')
_BLOCK = 1 << 14


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


def seek(file: BinaryIO, target: int, steps: tuple[int, int]) -> None:
    """Seek to a line shortly before those of step ``target``, or to the beginning of the file.

    ``steps`` are the first and last step of the file, between which it interpolates.
    """
    low, high = 0, file.seek(0, 2)
    low_step, high_step = steps[0], steps[1] + 1
    for attempt in range(64):
        if target - low_step <= 1 or high - low <= _BLOCK:
            break
        share = (target - low_step - 1.5) / max(1, high_step - low_step) if attempt % 4 < 3 else 0.5
        guess = low + min(max(int(share * (high - low)), 1), high - low - 1)
        found = _next_step(file, guess)
        if found is None or found[0] >= high or found[1] >= target:
            high = guess
            if found is not None:
                high_step = max(found[1], low_step + 1)
        else:
            low, low_step = found
    file.seek(low)
