"""The kernels of codecs for CPUs and GPUs, and the byte format of quantized gradients."""

from __future__ import annotations

import functools
import importlib
from typing import Protocol, cast

from torch import Tensor

from torchmn.base.errors import raise_if_unknown, require
from torchmn.comm.codecs.base import Lost
from torchmn.comm.codecs.kernels.wire_format import StripePlan


class Kernels(Protocol):
    """The functions of the modules `cpu` and `cuda`."""

    def encode(self, values: Tensor, lost: Lost | None, out: Tensor, plan: StripePlan) -> Tensor:
        """Encode a stripe; returns flags (num_segments,) uint8, nonzero for segments not finite.

        ``values`` is (span,) in the wide dtype, ``out`` is (plan.nbytes,) uint8. ``lost``: see
        `StripeCodec.encode_with_feedback`. A block that is not finite is encoded as NaN.
        """

    def decode(self, encoded: Tensor, out: Tensor, plan: StripePlan, *, add: bool) -> Tensor:
        """Decode into ``out`` (span,) in the wide dtype, or add to it; returns such flags."""

    def outer_sum(self, p: Tensor, q: Tensor, out: Tensor) -> None:
        """Write the product of ``p`` (n, r) and the transpose of ``q`` (m, r) to ``out`` (n, m).

        Terms are added in the order of r, and every product and sum is rounded, so the bits are
        the same on every machine, which matrix products do not guarantee.
        """

    def subtract_outer_(self, v: Tensor, p: Tensor, q: Tensor) -> None:
        """Subtract the product of ``p`` (n, r) and the transpose of ``q`` (m, r) from ``v``."""


_COMPILERS = {"cpu": ("numba", "torchmn[compression]"), "cuda": ("triton", "triton")}
"""By device type: the module that compiles the kernels, and what to install for it."""


@functools.cache
def kernels_for(device_type: str) -> Kernels:
    """The kernels for a device type. Raises UnsupportedError: their compiler is not installed."""
    raise_if_unknown("device of quantized gradients", device_type, _COMPILERS)
    compiler, package = _COMPILERS[device_type]
    require(compiler, f"Compressing gradients on {device_type}", package)
    # On first use, because the compilers take a second to import.
    return cast(Kernels, importlib.import_module(f"torchmn.comm.codecs.kernels.{device_type}"))
