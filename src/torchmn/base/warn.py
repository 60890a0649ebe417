"""Warnings of torchmn: of its own categories, and at the line of the script."""

from __future__ import annotations

import warnings

from torchmn.base.errors import TorchmnWarning
from torchmn.base.script_line import script_frame


def warn(text: str, category: type[TorchmnWarning] = TorchmnWarning) -> None:
    """Issue a warning, which Python shows once for each line of the script. Local.

    The line is the innermost one outside torchmn and torch, as ``stacklevel`` would choose it if
    the number of frames in between were known.
    """
    frame = script_frame()
    if frame is None:  # a thread of torchmn, or the end of the process
        warnings.warn(text, category, stacklevel=2)
        return
    names = frame.f_globals
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get("__name__"),
        registry=names.setdefault("__warningregistry__", {}),
    )
