"""The interface of codecs.

A compressed all-reduce of a bucket on W ranks makes these calls (CNTK's quantized all-reduce, Seide
et al. 2014):

    stripes = codec.split(layout, W)
    for each j but the own rank:      codec.encode_stripe(buffer, stripes[j], bytes_j)   -> rank j
    once, the own part unencoded:    codec.flush_residual_into(buffer, stripes[rank])
    for what came from each rank:    codec.decode_stripe(bytes, stripes[rank], buffer, add=True)
    once, the sum:                   codec.encode_stripe(buffer, stripes[rank], bytes, "owner")
                                                                                        -> all ranks
    for each j, the own rank too:    codec.decode_stripe(bytes_j, stripes[j], buffer)
    after the last bucket of an exchange, before the next exchange encodes anything:
                                     found = codec.nonfinite.take(fetch)
                                     codec.finish(is_valid=codec.nonfinite.is_clear("decoding"))

and before the first bucket of an exchange, codec.begin(total_scale) if the
codec `keeps_residuals`.

16-bit buffers are summed in a separate float32 buffer, see `Layout.moved`. Each rank multiplies
its gradient by a scale before it is encoded, so that the owner's sum is ``total_scale`` times the
mean, where ``total_scale`` is the sum of the scales of all ranks. It is 1 if each rank's scale is
one over the number of ranks, and differs between exchanges if ranks have weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.comm.codecs.layout import Layout, Segment
from torchmn.comm.streams import Deferred

Side = Literal["worker", "owner"]
"""The role of an encoding rank: a worker encodes its gradient, an owner the sum of its stripe."""

IsValid = bool | Tensor
"""Whether the decoded values of an exchange are valid; on a GPU a 0-dim bool tensor."""

ALIGNMENT = 8  # bytes; encoded stripes must begin at a multiple of it


class Lost(NamedTuple):
    """The residual of a stripe, and memory for the new one: (stripe.span,), in the wide dtype.

    Element 0 corresponds to element ``stripe.begin`` of the buffer.
    """

    before: Tensor
    now: Tensor


class Codec(ABC):
    """A compressed form of gradients, and its state. See `StripeCodec` and `PowerSGD`.

    >>> from torchmn.comm.codecs import Codec, PowerSGD
    >>> isinstance(PowerSGD(), Codec)
    True
    """

    name: str
    needs_whole_parameters = False
    """Whether routes that shard parameters between the ranks of a node cannot use it."""
    keeps_residuals = False
    """Whether it adds residuals of earlier exchanges, which requires calls of `begin`."""

    def __init__(self) -> None:
        self.nonfinite = NonfiniteTracker()
        """The parameters with values that are not finite, since the last `finish`."""
        self.total_scale = 1.0
        """The factor between the sum and the mean of the current exchange, see `begin`."""

    def begin(self, total_scale: float) -> None:
        """Begin an exchange in which the sum over ranks is ``total_scale`` times the mean.

        Residuals of an exchange with another ``total_scale`` are multiplied by the ratio of the two
        before they are added, so that they add to the mean exactly what an earlier mean has lost.
        0 means that no rank contributes; `finish` is then called with ``is_valid=False``.
        """
        if total_scale > 0:
            self.total_scale = total_scale

    def finish(self, *, is_valid: IsValid) -> None:
        """End an exchange. Called when all its buckets are decoded and none of the next is encoded.

        ``is_valid=False`` (a gradient on some rank was not finite; the same on all ranks) discards
        the residuals of this exchange. If it is a tensor, the host does not read it: the choice is
        made on the device.
        """
        self.nonfinite.clear()

    def new_instance(self) -> Codec:
        """A codec with the same options and a new state: exchanges must not share residuals."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank that outlives a step: copies of tensors, and numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; an empty dict resets. Raises UsageError: not of this codec."""
        if state:
            raise UsageError(f"The codec {self.name} has no state, but was given {sorted(state)}.")

    def warm_up(self, layout: Layout, device: torch.device) -> None:  # noqa: B027 - most have no kernels
        """Compile kernels and allocate memory for buckets of this layout before the first step."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class StripeCodec(Codec):
    """Encodes stripes of a bucket as bytes and decodes them. Local; called inside an exchange.

    ``values``, and ``out`` of `decode_stripe`, are the buffer (n,) to whose elements the segments
    of a layout refer. ``encoded``, and ``out`` of `encode_stripe`, are contiguous uint8 tensors
    (stripe_nbytes,) that begin at a multiple of 8 bytes. A subclass defines the three abstract
    methods; all others have defaults.

    >>> from torchmn.comm.codecs import Float16, Layout, StripeCodec
    >>> codec: StripeCodec = Float16()
    >>> stripe = Layout.of([("weight", 0, (3,))], torch.float32)
    >>> encoded = torch.empty(codec.stripe_nbytes(stripe), dtype=torch.uint8)
    >>> codec.encode_stripe(torch.tensor([1.0, 2.5, 1e-9]), stripe, encoded)
    >>> decoded = torch.ones(3)
    >>> codec.decode_stripe(encoded, stripe, decoded, add=True)
    >>> len(encoded), decoded.tolist()
    (6, [2.0, 3.5, 1.0])
    """

    block_length: int = 1
    """Stripes begin at multiples of this many elements of a parameter."""
    bits: float = 32
    """Bits sent per element of a parameter that is not small."""

    @abstractmethod
    def stripe_nbytes(self, stripe: Layout) -> int:
        """The number of bytes that `encode_stripe` writes; the same on all ranks."""

    @abstractmethod
    def encode_stripe(
        self, values: Tensor, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        """Encode the stripe's elements of ``values`` into ``out``. ``values`` is not changed.

        Values that are not finite must be recorded in `nonfinite` and be decoded to values that are
        not finite.
        """

    @abstractmethod
    def decode_stripe(
        self, encoded: Tensor, stripe: Layout, out: Tensor, *, add: bool = False
    ) -> None:
        """Write the decoded elements into ``out``, or add them to it.

        Elements before and after the stripe are not changed; those between its segments are
        unspecified.
        """

    def split(self, layout: Layout, num_stripes: int) -> tuple[Layout, ...]:
        """Split a bucket at block boundaries into stripes of about the same number of bytes."""
        # Small parameters are sent unencoded, so that one of their elements costs more bytes.
        return layout.split(num_stripes, self.block_length, small_cost=max(1.0, 32 / self.bits))

    def encode_with_feedback(
        self, values: Tensor, lost: Lost, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        """Encode v = values + lost.before, and write v minus its decoded value to ``lost.now``.

        If v is not finite, ``lost.now`` becomes ``lost.before``. Called by `ErrorFeedback`. This
        implementation makes four passes over memory; override it if fewer are possible.
        """
        # The sum is made in the memory of the new residual, where the stripe begins at element 0.
        local = stripe.moved(-stripe.begin, stripe.wide_dtype)
        torch.add(lost.before, span_of(values, stripe), out=lost.now)
        self.encode_stripe(lost.now, local, out, side)
        decoded = torch.zeros_like(lost.now)
        self.decode_stripe(out, local, decoded)
        lost.now.sub_(decoded)
        is_finite = torch.isfinite(lost.now)
        # On a CPU the host can look, which costs less than a copy that is hardly ever needed.
        if lost.now.device.type != "cpu" or not is_finite.all():
            torch.where(is_finite, lost.now, lost.before, out=lost.now)

    def flush_residual_into(self, values: Tensor, stripe: Layout, side: Side = "worker") -> None:
        """Add the residual to ``values``, which are then used without being encoded.

        ``values`` has at least 32 bits. A single rank flushes its whole bucket, on both sides.
        """
        # These values are never encoded, where values that are not finite would be found.
        self.nonfinite.scan("encoding", stripe, span_of(values, stripe))

    def new_instance(self) -> StripeCodec:
        return self


def anonymous_layout(numel: int, dtype: torch.dtype) -> Layout:
    """The layout of a buffer whose parameters have no names."""
    return Layout((Segment("", 0, numel),) if numel else (), dtype)


def span_of(values: Tensor, stripe: Layout) -> Tensor:
    """A view (stripe.span,) of a stripe in a buffer. Raises UsageError: the buffer is too short."""
    if values.dim() != 1 or values.numel() < stripe.end:
        raise UsageError(
            f"The stripe ends at element {stripe.end}, but the buffer has shape "
            f"{tuple(values.shape)}. Give the whole bucket, in one dimension."
        )
    return values[stripe.begin : stripe.end]


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to a multiple of 8."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def check_encoded(encoded: Tensor, nbytes: int) -> None:
    """Raise UsageError if a tensor cannot be an encoded stripe of ``nbytes``."""
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


When = Literal["encoding", "decoding"]


class NonfiniteTracker:
    """Records which parameters of an exchange have values that are not finite. Local.

    Those found in *encoding*, or flushing as a worker, are in this rank's own gradient. Those found
    in *decoding* are known to all ranks that decode the same bytes. Flags on a GPU stay there: the
    host does not wait for them unless `names` is called.
    """

    def __init__(self) -> None:
        self._found = FoundNonfinite()

    def record_flags(self, when: When, stripe: Layout, flags: Tensor) -> None:
        """Record ``flags`` (num_segments,), which are nonzero for segments that are not finite."""
        self._found.add(when, [segment.name for segment in stripe.segments], flags)

    def scan(self, when: When, stripe: Layout, span: Tensor) -> None:
        """Scan ``span`` (stripe.span,) and record its parameters that are not finite."""
        if not span.numel():
            return
        # A GPU is not waited for. aminmax() returns NaN if there is one.
        if span.device.type == "cpu" and all(map(math.isfinite, torch.aminmax(span))):
            return
        parts = [span[s.start - stripe.begin : s.end - stripe.begin] for s in stripe.segments]
        self.scan_each(when, [segment.name for segment in stripe.segments], parts)

    def scan_each(self, when: When, names: Sequence[str], tensors: list[Tensor]) -> None:
        """Scan tensors, and record the names of those that are not finite."""
        if tensors:
            # One kernel for many tensors on a GPU. The maximum norm cannot overflow.
            largest = torch.stack(torch._foreach_norm(tensors, ord=float("inf")))
            self._found.add(when, names, ~torch.isfinite(largest))

    def is_clear(self, when: When) -> IsValid:
        """Whether nothing has been found so far. The host does not wait for a device."""
        return self._found.is_clear(when)

    def names(self, when: When) -> list[str]:
        """The parameters found, each once, in the order of detection. Waits for the GPU."""
        return self._found.names(when)

    def take(self, fetch: Callable[[Tensor], Deferred]) -> FoundNonfinite:
        """What has been found so far. ``fetch`` starts to copy flags of a device to the host."""
        self._found.start(fetch)
        return self._found

    def clear(self) -> None:
        """Forget what was found, for a new exchange."""
        self._found = FoundNonfinite()


class FoundNonfinite:
    """The parameters of an exchange that are not finite, known once their flags have arrived."""

    def __init__(self) -> None:
        self._names: dict[When, list[str]] = {"encoding": [], "decoding": []}
        self._unread: list[tuple[When, Sequence[str], Tensor]] = []
        self._deferred: Deferred | None = None

    def add(self, when: When, names: Sequence[str], flags: Tensor) -> None:
        """Add the names for which ``flags`` (n,) is not zero."""
        if flags.device.type == "cpu":
            self._names[when] += _named(names, flags)
        else:
            self._unread.append((when, names, flags))

    def is_clear(self, when: When) -> IsValid:
        """Whether nothing was found. For flags on a device the result is a tensor there."""
        flags = [flags for each, _, flags in self._unread if each == when]
        is_clear = not self._names[when]
        return ~torch.cat(flags).any() & is_clear if flags else is_clear

    def start(self, fetch: Callable[[Tensor], Deferred]) -> None:
        """Start to copy flags from a device to the host."""
        if self._unread:
            flags = torch.cat([flags.to(torch.uint8) for _, _, flags in self._unread])
            self._deferred = fetch(flags)

    def names(self, when: When) -> list[str]:
        """The parameters found, each once, in the order of detection.

        Blocks until the flags have arrived.
        """
        if self._deferred is not None:
            whole, self._deferred = self._deferred.get(), None
            counts = [len(names) for _, names, _ in self._unread]
            flags = dict(enumerate(whole.split(counts)))
        else:
            flags = {i: flags.cpu() for i, (_, _, flags) in enumerate(self._unread)}
        for position, (each, names, _) in enumerate(self._unread):
            self._names[each] += _named(names, flags[position])
        self._unread.clear()
        return list(dict.fromkeys(self._names[when]))


def _named(names: Sequence[str], flags: Tensor) -> list[str]:
    """The names whose flag is not zero. ``flags`` are on the CPU."""
    return [names[i] for i in flags.nonzero().flatten().tolist()] if flags.any() else []
