"""torchmn: train PyTorch models on many workers.

The public names load on first use, so that importing `torchmn` costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmn.errors import TorchmnError, run_main
    from torchmn.topology import Place, Topology

__version__ = "0.1.0"

_HOME = {
    "Place": "torchmn.topology",
    "Topology": "torchmn.topology",
    "TorchmnError": "torchmn.errors",
    "run_main": "torchmn.errors",
}

__all__ = [
    "Place",
    "Topology",
    "TorchmnError",
    "run_main",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'torchmn' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
