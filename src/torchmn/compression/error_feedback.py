"""Error feedback: what a codec loses in one step is added to what it encodes in the next.

    v = g + r,   send Q(v),   r <- v - Q(v)

so that after any number of steps the sum of what was sent is the sum of the gradients less the
residual r that remains (Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019). Both sides
have residuals: the worker for its gradient, the owner of a stripe for the mean.

An exchange whose sum is c times the mean keeps residuals r = c R. What counts is R, the part of the
mean that was lost; with another c', because the weights of the ranks have changed, r is multiplied
by c' / c first (see `Codec.begin`). So for any history of weights

    sum of returned means = sum of true means - sum of all R that remain

Differences from CNTK: residuals are part of the state, where CNTK set them to zero at every
checkpoint; they are kept by the parameter's name, so that they outlive another layout of buckets
(PyTorch's PowerSGD hook keyed by bucket and lost them) and another number of workers (`reshard`);
a worker adds its own stripe to the sum unencoded; an exchange with a gradient that is not finite
leaves them as they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn.compression.base import Side, StripeCodec, span_of
from torchmn.compression.layout import Layout
from torchmn.compression.residuals import ResidualBlock, Residuals
from torchmn.errors import UnsupportedError, UsageError


class ErrorFeedback(StripeCodec):
    """Wraps any stripe codec. Memory: 8 bytes an element as a worker, and as much over W as owner.

    One object belongs to one exchange: its residuals are of that exchange's parameters.
    """

    keeps_residuals = True

    def __init__(self, codec: StripeCodec) -> None:
        if not isinstance(codec, StripeCodec):
            raise UsageError(
                f"ErrorFeedback wraps a codec of stripes, such as Quantized(bits=1), and {codec!r} "
                "is none. PowerSGD has error feedback of its own: give it as it is."
            )
        if isinstance(codec, ErrorFeedback):
            raise UsageError(f"{codec!r} has error feedback already: wrap the codec inside it.")
        super().__init__()
        self.codec = codec
        self.name = f"{codec.name}+residual"
        self.block_length = codec.block_length
        self.bits = codec.bits
        self.nonfinite = codec.nonfinite
        self._residues = Residuals()

    def begin(self, total_scale: float) -> None:
        """See `Codec.begin`."""
        super().begin(total_scale)
        self.codec.begin(total_scale)
        self._residues.scale = self.total_scale

    def stripe_nbytes(self, stripe: Layout) -> int:
        """See `StripeCodec.stripe_nbytes`."""
        return self.codec.stripe_nbytes(stripe)

    def encode_stripe(
        self, values: Tensor, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        """See `StripeCodec.encode_stripe`. A worker encodes stripes that are not its own."""
        run = self._run(side, stripe, values.device, is_owner=side == "owner")
        self.codec.encode_with_feedback(values, run.now, run.rest, stripe, out, side)
        run.is_written = True

    def decode_stripe(
        self, encoded: Tensor, stripe: Layout, out: Tensor, *, add: bool = False
    ) -> None:
        """See `StripeCodec.decode_stripe`."""
        self.codec.decode_stripe(encoded, stripe, out, add=add)

    def flush_residual_into(self, values: Tensor, stripe: Layout, side: Side = "worker") -> None:
        """See `StripeCodec.flush_residual_into`. Afterwards nothing of the stripe is owed."""
        super().flush_residual_into(values, stripe, side)
        run = self._run(side, stripe, values.device)
        span_of(values, stripe).add_(run.now)
        run.rest.zero_()
        run.is_written = True

    def finish(self, *, is_valid: bool) -> None:
        """See `StripeCodec.finish`."""
        self._residues.finish(is_valid=is_valid)
        self.codec.finish(is_valid=is_valid)

    def warm_up(self, stripe: Layout, device: torch.device) -> None:
        """See `StripeCodec.warm_up`."""
        self.codec.warm_up(stripe, device)

    def new_instance(self) -> StripeCodec:
        """See `StripeCodec.new_instance`."""
        return ErrorFeedback(self.codec.new_instance())

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank, between two exchanges. See `residuals.reshard`."""
        return {"residuals": self._residues.state_dict(), "codec": self.codec.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `StripeCodec.load_state_dict`."""
        self._residues.load_state_dict(state.get("residuals", []))
        self.codec.load_state_dict(state.get("codec", {}))

    def _run(
        self, side: Side, stripe: Layout, device: torch.device, *, is_owner: bool = True
    ) -> ResidualBlock:
        if any(not segment.name for segment in stripe.segments):
            raise UnsupportedError(
                f"{self.name} keeps residuals by the names of parameters, and this buffer has none: "
                "it can only be carried by an exchange of named parameters."
            )
        return self._residues.run(side, stripe, device, is_owner=is_owner)

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r})"
