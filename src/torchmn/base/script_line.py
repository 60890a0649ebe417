"""The line of the user's script that is being executed, for error messages.

Only this module inspects the frames of callers for messages, and nothing else depends on the
result. `torchmn.nn.functions.recomputation` inspects frames for another reason, given there.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import FrameType


def script_line() -> str:
    """The innermost line outside torchmn and torch, as ``train.py:12 in forward``. Local."""
    frame = script_frame()
    if frame is None:
        return "an unknown line"
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def script_frame() -> FrameType | None:
    """The innermost frame outside torchmn and torch; None if this thread has none. Local."""
    libraries = _libraries()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
    return frame


@cache
def _libraries() -> tuple[str, ...]:
    # Without importing torch, which takes seconds.
    found = importlib.util.find_spec("torch")
    return str(Path(__file__).parents[1]), *(
        found.submodule_search_locations or () if found else ()
    )
