"""Where in the script a function is called: for errors, and for the order of a program."""

from __future__ import annotations

import dis
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))

_JUMPS = {*dis.hasjrel, *dis.hasjabs}

Position = tuple[tuple[CodeType, int], ...]
"""The calls on the stack, outermost first, each with its instruction."""


def source_line() -> str:
    """The innermost line outside of torchmn and torch: ``train.py:12 in forward``. Local."""
    frame = _script_frame()
    if frame is None:
        return "an unknown line"
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def position() -> Position:
    """The position of the program outside of torchmn and torch. Local."""
    found = []
    frame = _script_frame()
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(found))


def is_before(earlier: Position, later: Position) -> bool:
    """Whether a call and one after it are in one run of the same function.

    The second may be in a function that is called there; no loop has only one of both.
    """
    if not 0 < len(earlier) <= len(later) or earlier[:-1] != later[: len(earlier) - 1]:
        return False
    (code, first), (other, second) = earlier[-1], later[len(earlier) - 1]
    if code is not other or first >= second:
        return False
    return not any(
        (start <= first <= end) != (start <= second <= end) for start, end in _loops(code)
    )


@cache
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """First and last instruction of each loop of a function: what jumps lead back over."""
    return tuple(
        (instruction.argval, instruction.offset)
        for instruction in dis.get_instructions(code)
        if instruction.opcode in _JUMPS and instruction.argval <= instruction.offset
    )


def _script_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame
