"""The line of the user's script that is being executed, for error messages.

Only this module inspects the frames of callers for messages, and nothing else depends on the
result. `torchmn.nn.functions.recomputation` inspects frames for another reason, given there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_internal(file: str) -> bool:
    """Whether a file belongs to torchmn or torch, or is `contextlib`, which calls both. Local."""
    return file.startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    # Without importing torch, which takes seconds.
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations or () if found else ()
    # Between a `with` of the script and torchmn, and between functions of torchmn.
    own = os.path.join(Path(__file__).parents[1], "")
    return (own, contextlib.__file__, *(os.path.join(each, "") for each in folders))
