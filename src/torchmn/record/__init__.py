"""Where the time of a step goes: the record that each run keeps, and profiles of chosen steps.

The names load on first use: what reads records needs no torch.
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
