"""Tools for tests of torchmn and of code that uses it: ranks as threads, MPI pools, test hosts.

Names are loaded on first use, so that `torchmn.testing.netlab` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmn.testing import netlab as netlab
    from torchmn.testing.mpi_pool import MpiPool
    from torchmn.testing.ranks import run_ranks

_HOME = {"MpiPool": "torchmn.testing.mpi_pool", "run_ranks": "torchmn.testing.ranks"}

__all__ = ["MpiPool", "run_ranks"]


def __getattr__(name: str) -> object:
    if name == "netlab":
        return import_module("torchmn.testing.netlab")
    if name not in _HOME:
        raise AttributeError(f"module 'torchmn.testing' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "netlab"})
