"""Quantization of gradients to 8, 4, 2 or 1 bits per element.

Each block of ``block_length`` elements of a parameter is quantized separately. With 8, 4 and 2 bits
a block has one scale s, and a value v becomes q s with

    q = clip(round(v / s), -L, L),   L = 2**(bits - 1) - 1 = 127, 7, 1
    8 bits:  s = max|v| / L
    4 bits:  s = min(max|v|, 2.5 t) / L      t = sum v**2 / sum |v|, the typical size of v
    2 bits:  s = min(max|v|, t)

With three levels t is the optimal s for Laplace and uniform distributions and for values of equal
magnitude, and within 2 % of it for normal distributions. With the maximum nearly all values would
become 0, because the largest of 512 normal values is about 3 sigma. Zero stays zero.

With 1 bit a block has two values (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech
2014):

    v becomes   mean of the block's elements >= 0   where v >= 0
                mean of the block's elements <  0   elsewhere

so that a zero among other values changes, but a block of zeros does not.

Differences from CNTK: blocks of a fixed length instead of columns of a matrix (the columns of a 3x3
convolution have 3 elements and gain nothing); levels over the ranges above instead of 4 standard
deviations; small parameters are sent uncompressed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.comm.codecs.base import Lost, Side, StripeCodec, check_encoded, span_of
from torchmn.comm.codecs.kernels import kernels_for
from torchmn.comm.codecs.kernels.wire_format import QuantizationSpec, StripePlan, plan_stripe
from torchmn.comm.codecs.layout import Layout

BLOCK_LENGTHS = {8: 512, 4: 512, 2: 512, 1: 1024}


class Quantized(StripeCodec):
    """A stripe codec with few bits per element. It is lossy: wrap it in `ErrorFeedback`.

    ``block_length`` is a multiple of 32. Values outside the range of float32 count as not finite.
    float64 buffers use float32 scales and float64 residuals. On CPUs it needs numba, on GPUs
    Triton.

    Example:
        >>> Quantized(bits=4, block_length=256).bits  # with the scale of each block
        4.125
    """

    def __init__(self, bits: int = 8, *, block_length: int | None = None) -> None:
        super().__init__()
        if bits not in BLOCK_LENGTHS:
            raise UsageError(f"bits={bits} must be 8, 4, 2 or 1.")
        if block_length is not None and (block_length < 32 or block_length % 32):
            raise UsageError(f"block_length={block_length} must be a positive multiple of 32.")
        self.spec = QuantizationSpec(bits, block_length or BLOCK_LENGTHS[bits])
        self.block_length = self.spec.block_length
        self.bits = bits + 32 * self.spec.num_floats / self.block_length
        self.name = "1bit" if bits == 1 else f"int{bits}"
        self._plans: dict[Layout, StripePlan] = {}

    def stripe_nbytes(self, stripe: Layout) -> int:
        return self.plan(stripe).nbytes

    def encode_stripe(
        self, values: Tensor, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        self._encode(values, None, stripe, out, side)

    def encode_with_feedback(
        self, values: Tensor, lost: Lost, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        """See `StripeCodec.encode_with_feedback`. Makes a single pass over memory."""
        self._encode(values, lost, stripe, out, side)

    def decode_stripe(
        self, encoded: Tensor, stripe: Layout, out: Tensor, *, add: bool = False
    ) -> None:
        plan = self.plan(stripe)
        check_encoded(encoded, plan.nbytes)
        span = span_of(out, stripe)
        is_direct = span.dtype == stripe.wide_dtype and span.is_contiguous()
        # 16-bit and strided buffers use a copy of the span, so that elements between segments stay.
        wide = span if is_direct else span.to(stripe.wide_dtype).contiguous()
        flags = kernels_for(out.device.type).decode(encoded, wide, plan, add=add)
        if not is_direct:
            span.copy_(wide)
        self.nonfinite.record_flags("decoding", stripe, flags)

    def warm_up(self, stripe: Layout, device: torch.device) -> None:
        """Compile the kernels for such stripes, which takes about ten seconds once per machine."""
        self.plan(stripe)
        sample = Layout.of([("", 0, (self.block_length,)), ("w", 2048, (2, 1024))], stripe.dtype)
        probe = self.new_instance()  # so that this one records no flags
        values = torch.zeros(sample.end, dtype=sample.wide_dtype, device=device)
        encoded = torch.empty(probe.stripe_nbytes(sample), dtype=torch.uint8, device=device)
        probe.encode_stripe(values, sample, encoded)
        lost = Lost(values, torch.empty_like(values))
        probe.encode_with_feedback(values, lost, sample, encoded)
        for add in (False, True):
            probe.decode_stripe(encoded, sample, values, add=add)

    def new_instance(self) -> StripeCodec:
        return Quantized(self.spec.bits, block_length=self.block_length)

    def plan(self, stripe: Layout) -> StripePlan:
        """The byte layout of a stripe, which is computed once and cached."""
        plan = self._plans.get(stripe)
        if plan is None:
            plan = self._plans[stripe] = plan_stripe(stripe, self.spec)
        return plan

    def _encode(
        self, values: Tensor, lost: Lost | None, stripe: Layout, out: Tensor, side: Side
    ) -> None:
        plan = self.plan(stripe)
        check_encoded(out, plan.nbytes)
        span = span_of(values, stripe).to(stripe.wide_dtype).contiguous()
        kernels = kernels_for(values.device.type)
        flags = kernels.encode(span, lost, out, plan)
        # An owner's sum is recorded when all ranks, this one included, decode it.
        if side == "worker":
            self.nonfinite.record_flags("encoding", stripe, flags)

    def __repr__(self) -> str:
        return f"Quantized(bits={self.spec.bits}, block_length={self.block_length})"
