"""The kernels of codecs (reference, CPU and CUDA) and their byte format."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Protocol, cast

from torch import Tensor

from torchmn.base.errors import PerformanceWarning
from torchmn.base.warn import warn
from torchmn.comm.codecs.base import Lost
from torchmn.comm.codecs.kernels.wire_format import Noise, StripePlan


class Kernels(Protocol):
    """The functions of the modules `reference`, `cpu` and `cuda`."""

    def encode(
        self, values: Tensor, lost: Lost | None, out: Tensor, plan: StripePlan, noise: Noise | None
    ) -> Tensor:
        """See `reference.encode`."""

    def decode(self, encoded: Tensor, out: Tensor, plan: StripePlan, *, add: bool) -> Tensor:
        """See `reference.decode`."""

    def outer_sum(self, p: Tensor, q: Tensor, out: Tensor) -> None:
        """See `reference.outer_sum`."""

    def subtract_outer_(self, v: Tensor, p: Tensor, q: Tensor) -> None:
        """See `reference.subtract_outer_`."""


_COMPILERS = {"cpu": ("numba", "cpu"), "cuda": ("triton", "cuda")}


@functools.cache
def kernels_for(device_type: str) -> Kernels:
    """The fastest kernels available for a device type. Warns once if they are not compiled."""
    compiler, module = _COMPILERS.get(device_type, ("", ""))
    if compiler and importlib.util.find_spec(compiler) is not None:
        return _load(module)
    cure = {
        "numba": " Install numba: pip install 'torchmn[compression]'.",
        "triton": " Install triton.",
    }
    warn(
        f"Gradients on {device_type} are quantized with plain torch, about ten times slower than "
        f"with compiled kernels.{cure.get(compiler, '')}",
        PerformanceWarning,
    )
    return _load("reference")


def _load(module: str) -> Kernels:
    # Imported on first use: a compiler takes a second to import and may not be installed.
    return cast(Kernels, importlib.import_module(f"torchmn.comm.codecs.kernels.{module}"))
