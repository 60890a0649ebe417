"""Wrong codecs, by the contract that must catch each."""

import torch

from torchmn.comm.codecs import ErrorFeedback, Layout, Quantized
from torchmn.comm.codecs.layout import Segment


class Base(ErrorFeedback):
    """What they are before they are broken."""

    def __init__(self):
        super().__init__(Quantized(bits=4))

    def new_instance(self):
        return type(self)()


class KeepsNoResidual(Base):
    """Encodes the gradient and discards the residual."""

    def encode_stripe(self, values, stripe, out, side="worker"):
        super().encode_stripe(values, stripe, out, side)
        self._residuals.block(side, stripe, values.device, is_owner=True).pending.zero_()


class ForgetsTheOwner(Base):
    """Has a residual as a worker only."""

    def encode_stripe(self, values, stripe, out, side="worker"):
        (super() if side == "worker" else self.codec).encode_stripe(values, stripe, out, side)


class WrongStripe(Base):
    """Sends the first elements of the buffer instead of those of the stripe."""

    def encode_stripe(self, values, stripe, out, side="worker"):
        rolled = torch.roll(values, stripe.segments[0].start) if stripe.segments else values
        super().encode_stripe(rolled, stripe, out, side)


class ForgetsABlockStart(Base):
    """Has blocks that continue from one parameter into the next."""

    def _as_one(self, stripe):
        if not stripe.segments:
            return stripe
        name = stripe.segments[0].name
        return Layout((Segment(name, stripe.begin, stripe.span),), stripe.dtype)

    def stripe_nbytes(self, stripe):
        return super().stripe_nbytes(self._as_one(stripe))

    def encode_stripe(self, values, stripe, out, side="worker"):
        super().encode_stripe(values, self._as_one(stripe), out, side)

    def decode_stripe(self, encoded, stripe, out, *, add=False):
        super().decode_stripe(encoded, self._as_one(stripe), out, add=add)


class CutsAnywhere(Base):
    """Cuts stripes in the middle of blocks."""

    def split(self, layout, num_stripes):
        return layout.split(num_stripes, 1)


class WritesTooFar(Base):
    """Clears a few elements after its stripe."""

    def decode_stripe(self, encoded, stripe, out, *, add=False):
        super().decode_stripe(encoded, stripe, out, add=add)
        out[stripe.end : stripe.end + 2] = 0


class SendsHalfSteps(Base):
    """Has no code for zero."""

    def decode_stripe(self, encoded, stripe, out, *, add=False):
        super().decode_stripe(encoded, stripe, out, add=add)
        for s in stripe.segments:
            run = out[s.start : s.end]
            run[run == 0] = 1e-3


class HidesNaN(Base):
    """Takes what is not finite for zero."""

    def encode_stripe(self, values, stripe, out, side="worker"):
        super().encode_stripe(torch.nan_to_num(values), stripe, out, side)

    def flush_residual_into(self, values, stripe, side="worker"):
        super().flush_residual_into(values, stripe, side)
        values.nan_to_num_()


class NeverRollsBack(Base):
    """Keeps the residuals of an exchange whose result is discarded."""

    def finish(self, *, is_valid):
        super().finish(is_valid=True)


class SavesHalf(Base):
    """Saves the workers' residuals only."""

    def state_dict(self):
        state = super().state_dict()
        state["residuals"] = [e for e in state["residuals"] if e["side"] == "worker"]
        return state


class LosesResidualsInNewBuckets(Base):
    """Keeps residuals by bucket, as PyTorch's PowerSGD hook: another layout has none."""

    def encode_stripe(self, values, stripe, out, side="worker"):
        if len(stripe.segments) and all(key[1] != stripe for key in self._residuals._blocks):
            self._residuals.load_state_dict([])
        super().encode_stripe(values, stripe, out, side)


class ReshardsWorkersOnly(Base):
    """Gives the mean of the workers' residuals and loses those of owners."""
