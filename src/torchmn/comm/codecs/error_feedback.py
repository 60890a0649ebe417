"""Error feedback: what a codec loses in one step is added to what it encodes in the next.

    v = g + r,   send Q(v),   r <- v - Q(v)

so that after any number of steps the sum of what was sent is the sum of the gradients less the
residual r that remains (Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019). Both sides
have residuals: the worker for its gradient, the owner of a stripe for the mean.

An exchange whose sum is c times the mean keeps residuals r = c R, where R is the part of the mean
that was lost. With another c', because the weights of the ranks have changed, r is multiplied by
c' / c first (see `Codec.begin`). So for any history of weights

    sum of returned means = sum of true means - sum of all R that remain

Differences from CNTK: residuals are part of the state, where CNTK set them to zero at every
checkpoint; they are stored by the parameter's name, so that they survive another layout of buckets
(PyTorch's PowerSGD hook stores them by bucket and loses them) and another number of workers
(`reshard`); a worker adds its own stripe to the sum unencoded; an exchange with a gradient that is
not finite leaves them unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn.base.errors import UnsupportedError, UsageError
from torchmn.comm.codecs.base import IsValid, Lost, Side, StripeCodec, span_of
from torchmn.comm.codecs.layout import Layout
from torchmn.comm.codecs.residuals import Residuals


class ErrorFeedback(StripeCodec):
    """Adds error feedback to a stripe codec. Needs 8 bytes of memory per element of all stripes.

    Each exchange needs an object of its own, for the residuals of its parameters. Raises
    UsageError: ``codec`` is not a stripe codec, or already has error feedback.

    Example:
        >>> codec = ErrorFeedback(torchmn.compression.Quantized(bits=1))  # the same as codec="1bit"
        >>> codec.keeps_residuals
        True
    """

    keeps_residuals = True

    def __init__(self, codec: StripeCodec) -> None:
        if not isinstance(codec, StripeCodec):
            raise UsageError(
                f"ErrorFeedback wraps a stripe codec, such as Quantized(bits=1), and {codec!r} is "
                "not one. PowerSGD has its own error feedback: use it without the wrapper."
            )
        if isinstance(codec, ErrorFeedback):
            raise UsageError(f"{codec!r} already has error feedback: wrap the codec inside it.")
        super().__init__()
        self.codec = codec
        self.name = f"{codec.name}+residual"
        self.block_length = codec.block_length
        self.bits = codec.bits
        # One record: the codec inside finds the values, and the exchange asks this object for them.
        self.nonfinite = codec.nonfinite
        self._residuals = Residuals()

    def begin(self, total_scale: float) -> None:
        super().begin(total_scale)
        self.codec.begin(total_scale)
        self._residuals.scale = self.total_scale

    def stripe_nbytes(self, stripe: Layout) -> int:
        return self.codec.stripe_nbytes(stripe)

    def encode_stripe(
        self, values: Tensor, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        """See `StripeCodec.encode_stripe`. A worker encodes only stripes of other owners."""
        self._raise_without_names(stripe)
        is_owner = side == "owner"
        block = self._residuals.block(side, stripe, values.device, is_owner=is_owner)
        lost = Lost(block.current, block.pending)
        self.codec.encode_with_feedback(values, lost, stripe, out, side)
        block.is_written = True

    def decode_stripe(
        self, encoded: Tensor, stripe: Layout, out: Tensor, *, add: bool = False
    ) -> None:
        self.codec.decode_stripe(encoded, stripe, out, add=add)

    def flush_residual_into(self, values: Tensor, stripe: Layout, side: Side = "worker") -> None:
        """See `StripeCodec.flush_residual_into`. The residual of the stripe becomes zero."""
        super().flush_residual_into(values, stripe, side)
        self._raise_without_names(stripe)
        self._residuals.flush_into(span_of(values, stripe), side, stripe)

    def finish(self, *, is_valid: IsValid) -> None:
        self._residuals.finish(is_valid=is_valid)
        self.codec.finish(is_valid=is_valid)

    def warm_up(self, stripe: Layout, device: torch.device) -> None:
        self.codec.warm_up(stripe, device)

    def new_instance(self) -> StripeCodec:
        return ErrorFeedback(self.codec.new_instance())

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank. Call it between exchanges. See `residuals.reshard`."""
        return {"residuals": self._residuals.state_dict(), "codec": self.codec.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._residuals.load_state_dict(state.get("residuals", []))
        self.codec.load_state_dict(state.get("codec", {}))

    def _raise_without_names(self, stripe: Layout) -> None:
        if any(not segment.name for segment in stripe.segments):
            raise UnsupportedError(
                f"{self.name} stores residuals by parameter name, and this buffer has no names. "
                "Use it for the gradients of named parameters."
            )

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r})"
