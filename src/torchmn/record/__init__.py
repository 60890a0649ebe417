"""The record of where the time of each step goes, and profiles of chosen steps.

The names load on first use, since programs that only read records do without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmn.record.recording import Recording, record, report_value, trace

__all__ = ["Recording", "record", "report_value", "trace"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'torchmn.record' has no attribute {name!r}")
    return getattr(import_module("torchmn.record.recording"), name)
