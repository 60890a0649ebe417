"""The seam of the codecs that a compressed mean carries.

What the wire does with them, for a bucket on W ranks (CNTK's quantized all-reduce, Seide et al.
2014):

    stripes = codec.cut(layout, W)
    for each j but the own rank:     codec.encode_stripe(buffer, stripes[j], bytes_j)   -> rank j
    once, the own part unencoded:    codec.flush_residual_into(buffer, stripes[rank])
    for what came from each rank:    codec.decode_stripe(bytes, stripes[rank], buffer, add=True)
    once, the sum:                   codec.encode_stripe(buffer, stripes[rank], bytes, "owner")
                                                                                        -> all ranks
    for each j, the own rank too:    codec.decode_stripe(bytes_j, stripes[j], buffer)
    after the last bucket of an exchange, before the next exchange encodes anything:
                                     codec.finish(is_valid=not codec.nonfinite.names("decoding"))

and before the first bucket of an exchange, if the codec `keeps_residuals`, codec.begin(total_scale).

16-bit buffers are summed in a float32 buffer beside them, see `Layout.moved`. Each rank multiplies
its gradient by a scale before it is encoded, so that the owner's sum is ``total_scale`` times the
mean, with the sum of the scales for ``total_scale``: 1 where each rank's scale is one over the
number of ranks, and another number in each exchange where ranks have weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from torchmn.compression.layout import Layout, Segment
from torchmn.compression.nonfinite import NonfiniteTracker
from torchmn.errors import UsageError

Side = Literal["worker", "owner"]
"""Who encodes: a worker its gradient, or the owner of a stripe the mean."""

ALIGNMENT = 8  # bytes; encoded stripes must begin at a multiple of it


class Codec(ABC):
    """In which form gradients travel, and what is remembered about it. See the two kinds of it."""

    name: str
    needs_whole_parameters = False
    """Whether a route that cuts parameters between ranks of a node cannot serve it."""
    keeps_residuals = False
    """Whether it adds to an exchange what earlier ones have lost, and so asks for `begin`."""

    def __init__(self) -> None:
        self.nonfinite = NonfiniteTracker()
        """Which parameters had values that are not finite, since the last `finish`."""
        self.total_scale = 1.0
        """How many times its mean the sum of the current exchange is, see `begin`."""

    def begin(self, total_scale: float) -> None:
        """Begin an exchange in which the sum over ranks is ``total_scale`` times the mean.

        A residual that was kept in an exchange with another ``total_scale`` is multiplied by the
        ratio of the two before it is added, so that it adds to the mean exactly what was lost of
        an earlier mean. 0 is a sum of nothing, after which `finish` is told ``is_valid=False``.
        """
        if total_scale > 0:
            self.total_scale = total_scale

    def finish(self, *, is_valid: bool) -> None:
        """End an exchange: all its buckets are decoded, none of the next is encoded.

        ``is_valid=False`` (a gradient somewhere was not finite; the same on all ranks) takes back
        what this exchange did to residuals, as if it had not been.
        """
        self.nonfinite.clear()

    def new_instance(self) -> Codec:
        """One like it with a state of its own: no two exchanges may share residuals."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, of this rank: tensors and numbers. A copy."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; an empty dict starts anew. Raises UsageError: not for us."""
        if state:
            raise UsageError(f"The codec {self.name} has no state, but was given {sorted(state)}.")

    def warm_up(self, layout: Layout, device: torch.device) -> None:  # noqa: B027 - most have no kernels
        """Compile and allocate what buckets of this kind need, so that no step has to."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class StripeCodec(Codec):
    """Turns a stripe of a bucket into bytes and back. Local; called inside an exchange.

    ``values``, ``out`` of `decode_stripe`: the buffer, (n,), in whose elements a layout's segments
    count. ``encoded``, ``out`` of `encode_stripe`: (stripe_nbytes,) uint8, contiguous, at a
    multiple of 8 bytes. An own codec writes the three abstract methods; whatever it does not say
    of blocks, state and residuals has a default.
    """

    block_length: int = 1
    """Stripes are cut at multiples of this many elements of a parameter."""
    bits: float = 32
    """On the wire, per element of a parameter that is not small."""

    @abstractmethod
    def stripe_nbytes(self, stripe: Layout) -> int:
        """Bytes that `encode_stripe` writes; the same on all ranks."""

    @abstractmethod
    def encode_stripe(
        self, values: Tensor, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        """Encode the stripe's elements of ``values`` into ``out``. ``values`` stays as it is.

        Values that are not finite must decode to some that are not, and be told to `nonfinite`.
        """

    @abstractmethod
    def decode_stripe(
        self, encoded: Tensor, stripe: Layout, out: Tensor, *, add: bool = False
    ) -> None:
        """Write the decoded elements into ``out``, or add them to it.

        Nothing before or behind the stripe is touched; what lies between its segments is nobody's.
        """

    def cut(self, layout: Layout, num_stripes: int) -> tuple[Layout, ...]:
        """The stripes of a bucket: of about equally many bytes, cut where this codec allows."""
        return layout.cut(num_stripes, self.block_length, small_cost=max(1.0, 32 / self.bits))

    def encode_with_feedback(
        self,
        values: Tensor,
        residual: Tensor,
        rest: Tensor,
        stripe: Layout,
        out: Tensor,
        side: Side = "worker",
    ) -> None:
        """Encode v = values + residual and write what is lost, v minus its decoded value, to rest.

        ``residual`` and ``rest``: (stripe.span,) of the wide dtype, element 0 for element
        ``stripe.begin`` of ``values``. Where v is not finite, ``rest`` is ``residual``. Called by
        `ErrorFeedback`; a codec with a faster way than this one, in four passes, overrides it.
        """
        local = stripe.moved(-stripe.begin, stripe.wide_dtype)
        torch.add(residual, span_of(values, stripe), out=rest)
        self.encode_stripe(rest, local, out, side)
        decoded = torch.zeros_like(rest)
        self.decode_stripe(out, local, decoded)
        rest.sub_(decoded)
        if not torch.isfinite(rest).all():
            torch.where(torch.isfinite(rest), rest, residual, out=rest)

    def flush_residual_into(self, values: Tensor, stripe: Layout, side: Side = "worker") -> None:
        """Add what is owed to ``values``, which go on unencoded: nothing of them is lost.

        ``values`` has at least 32 bits. One rank alone settles its whole bucket, on both sides.
        """
        self.nonfinite.scan("encoding", stripe, span_of(values, stripe))

    def new_instance(self) -> StripeCodec:
        """See `Codec.new_instance`."""
        return self


def anonymous_layout(numel: int, dtype: torch.dtype) -> Layout:
    """The layout of a buffer that is one run of elements."""
    return Layout((Segment("", 0, numel),) if numel else (), dtype)


def span_of(values: Tensor, stripe: Layout) -> Tensor:
    """The stripe's part of a buffer, (stripe.span,). Raises UsageError: the buffer is too short."""
    if values.dim() != 1 or values.numel() < stripe.end:
        raise UsageError(
            f"The stripe ends at element {stripe.end}, but the buffer has shape "
            f"{tuple(values.shape)}. Give the whole bucket, in one dimension."
        )
    return values[stripe.begin : stripe.end]


def aligned(nbytes: int) -> int:
    """The next multiple of 8 bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def check_encoded(encoded: Tensor, nbytes: int) -> None:
    """Raise UsageError if a buffer of bytes cannot hold exactly one encoded stripe."""
    if (
        encoded.dtype != torch.uint8
        or encoded.numel() != nbytes
        or not encoded.is_contiguous()
        or encoded.storage_offset() % ALIGNMENT
    ):
        raise UsageError(
            f"An encoded stripe must be {nbytes} contiguous bytes (uint8) that begin at a multiple "
            f"of {ALIGNMENT}, but is {encoded.numel()} of {encoded.dtype} at "
            f"{encoded.storage_offset()}."
        )
