"""The line of the user's script that runs, for the texts of errors.

Here alone a caller's frame is looked up, and nothing is decided by it but a text; what
`torchmn.nn.functions.recomputation` decides by frames is explained there.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import FrameType


def script_line() -> str:
    """The innermost line outside of torchmn and torch: ``train.py:12 in forward``. Local."""
    frame = script_frame()
    if frame is None:
        return "an unknown line"
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def script_frame() -> FrameType | None:
    """The innermost frame outside of torchmn and torch; None on a thread that has none. Local."""
    libraries = _libraries()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
    return frame


@cache
def _libraries() -> tuple[str, ...]:
    found = importlib.util.find_spec("torch")
    return str(Path(__file__).parents[1]), *(
        found.submodule_search_locations or () if found else ()
    )
