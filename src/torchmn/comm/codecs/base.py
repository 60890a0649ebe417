"""The interface of codecs.

How a compressed all-reduce calls them, for a bucket on W ranks (CNTK's quantized all-reduce, Seide
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
mean, with the sum of the scales for ``total_scale``: 1 where each rank's scale is one over the
number of ranks, and another number in each exchange where ranks have weights.
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
"""Who encodes: a worker its gradient, or the owner of a stripe the mean."""

IsValid = bool | Tensor
"""Whether what an exchange decoded counts; of a GPU a 0-dim bool that stays there."""

ALIGNMENT = 8  # bytes; encoded stripes must begin at a multiple of it


class Lost(NamedTuple):
    """The residual of a stripe, and the memory of the new one: (stripe.span,), the wide dtype.

    Element 0 is of element ``stripe.begin`` of the buffer.
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
    """Whether it does not work on routes that shard parameters between the ranks of a node."""
    keeps_residuals = False
    """Whether it adds the residuals of earlier exchanges, and so needs `begin`."""

    def __init__(self) -> None:
        self.nonfinite = NonfiniteTracker()
        """Which parameters had values that are not finite, since the last `finish`."""
        self.total_scale = 1.0
        """How many times its mean the sum of the current exchange is, see `begin`."""

    def begin(self, total_scale: float) -> None:
        """Begin an exchange in which the sum over ranks is ``total_scale`` times the mean.

        A residual that was kept in an exchange with another ``total_scale`` is multiplied by the
        ratio of the two before it is added, so that it adds to the mean exactly what was lost of
        an earlier mean. 0 is a sum of nothing; `finish` is then called with ``is_valid=False``.
        """
        if total_scale > 0:
            self.total_scale = total_scale

    def finish(self, *, is_valid: IsValid) -> None:
        """End an exchange: all its buckets are decoded, none of the next is encoded.

        ``is_valid=False`` (a gradient on some rank was not finite; the same on all ranks) undoes
        what this exchange did to residuals. A tensor is not looked at by the host: what happens
        depends on it on its device.
        """
        self.nonfinite.clear()

    def new_instance(self) -> Codec:
        """A codec with the same options and its own state: exchanges must not share residuals."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, of this rank: tensors and numbers. A copy."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`; an empty dict resets. Raises UsageError: another codec's."""
        if state:
            raise UsageError(f"The codec {self.name} has no state, but was given {sorted(state)}.")

    def warm_up(self, layout: Layout, device: torch.device) -> None:  # noqa: B027 - most have no kernels
        """Compile and allocate what buckets of this layout need, before the first step."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class StripeCodec(Codec):
    """Turns a stripe of a bucket into bytes and back. Local; called inside an exchange.

    ``values``, ``out`` of `decode_stripe`: the buffer, (n,), in whose elements a layout's segments
    count. ``encoded``, ``out`` of `encode_stripe`: (stripe_nbytes,) uint8, contiguous, at a
    multiple of 8 bytes. A subclass defines the three abstract methods; everything about blocks,
    state and residuals has a default.

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
    """Sent per element of a parameter that is not small."""

    @abstractmethod
    def stripe_nbytes(self, stripe: Layout) -> int:
        """Bytes that `encode_stripe` writes; the same on all ranks."""

    @abstractmethod
    def encode_stripe(
        self, values: Tensor, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        """Encode the stripe's elements of ``values`` into ``out``. ``values`` is not changed.

        Values that are not finite must decode to some that are not, and be recorded in
        `nonfinite`.
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
        """The stripes of a bucket: about the same number of bytes, split at block boundaries."""
        return layout.split(num_stripes, self.block_length, small_cost=max(1.0, 32 / self.bits))

    def encode_with_feedback(
        self, values: Tensor, lost: Lost, stripe: Layout, out: Tensor, side: Side = "worker"
    ) -> None:
        """Encode v = values + lost.before, and write v minus its decoded value to ``lost.now``.

        Where v is not finite, ``lost.now`` is ``lost.before``. Called by `ErrorFeedback`. This
        implementation makes four passes over memory; override it where fewer are possible.
        """
        local = stripe.moved(-stripe.begin, stripe.wide_dtype)
        torch.add(lost.before, span_of(values, stripe), out=lost.now)
        self.encode_stripe(lost.now, local, out, side)
        decoded = torch.zeros_like(lost.now)
        self.decode_stripe(out, local, decoded)
        lost.now.sub_(decoded)
        keep_finite_(lost)

    def flush_residual_into(self, values: Tensor, stripe: Layout, side: Side = "worker") -> None:
        """Add the residual to ``values``, which continue unencoded: nothing of them is lost.

        ``values`` has at least 32 bits. One rank alone flushes its whole bucket, on both sides.
        """
        self.nonfinite.scan("encoding", stripe, span_of(values, stripe))

    def new_instance(self) -> StripeCodec:
        return self


def anonymous_layout(numel: int, dtype: torch.dtype) -> Layout:
    """The layout of a buffer without parameter names."""
    return Layout((Segment("", 0, numel),) if numel else (), dtype)


def keep_finite_(lost: Lost) -> None:
    """Where the new residual is not finite, keep the old one. A GPU is not waited for."""
    is_finite = torch.isfinite(lost.now)
    if lost.now.device.type != "cpu" or not is_finite.all():
        torch.where(is_finite, lost.now, lost.before, out=lost.now)


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


When = Literal["encoding", "decoding"]


class NonfiniteTracker:
    """A record of one exchange. Local.

    What was found in *encoding* or flushing as a worker is this rank's own gradient; what was found
    in *decoding* is known to all ranks that decode the same bytes. Flags of a GPU stay there: the
    host does not wait for them unless `names` is called.
    """

    def __init__(self) -> None:
        self._found = FoundNonfinite()

    def record_flags(self, when: When, stripe: Layout, flags: Tensor) -> None:
        """``flags`` (num_segments,): not zero where a segment has values that are not finite."""
        self._found.add(when, [segment.name for segment in stripe.segments], flags)

    def scan(self, when: When, stripe: Layout, span: Tensor) -> None:
        """Scan ``span`` (stripe.span,), and every parameter in it if something is not finite."""
        if known_finite(span):
            return
        parts = [span[s.start - stripe.begin : s.end - stripe.begin] for s in stripe.segments]
        self.scan_each(when, [segment.name for segment in stripe.segments], parts)

    def scan_each(self, when: When, names: Sequence[str], tensors: list[Tensor]) -> None:
        """Scan tensors with a name each."""
        if tensors:
            # One kernel for many tensors on a GPU; of the largest magnitude none overflows.
            largest = torch.stack(torch._foreach_norm(tensors, ord=float("inf")))
            self._found.add(when, names, ~torch.isfinite(largest))

    def is_clear(self, when: When) -> IsValid:
        """Whether nothing was found so far. The host waits for no device."""
        return self._found.is_clear(when)

    def names(self, when: When) -> list[str]:
        """The parameters, each once, in the order in which they were found. Waits for the GPU."""
        return self._found.names(when)

    def take(self, fetch: Callable[[Tensor], Deferred]) -> FoundNonfinite:
        """What was found so far, on its way to the host by ``fetch``."""
        self._found.start(fetch)
        return self._found

    def clear(self) -> None:
        """Begin a new exchange."""
        self._found = FoundNonfinite()


class FoundNonfinite:
    """The parameters of one exchange that were not finite, known when their flags have arrived."""

    def __init__(self) -> None:
        self._names: dict[When, list[str]] = {"encoding": [], "decoding": []}
        self._unread: list[tuple[When, Sequence[str], Tensor]] = []
        self._deferred: Deferred | None = None

    def add(self, when: When, names: Sequence[str], flags: Tensor) -> None:
        """``flags`` (n,): not zero where the parameter of that name has been found."""
        if flags.device.type == "cpu":
            self._names[when] += _named(names, flags)
        else:
            self._unread.append((when, names, flags))

    def is_clear(self, when: When) -> IsValid:
        """Whether nothing was found."""
        flags = [flags for each, _, flags in self._unread if each == when]
        is_clear = not self._names[when]
        return ~torch.cat(flags).any() & is_clear if flags else is_clear

    def start(self, fetch: Callable[[Tensor], Deferred]) -> None:
        """Start to copy flags of a device to the host."""
        if self._unread:
            flags = torch.cat([flags.to(torch.uint8) for _, _, flags in self._unread])
            self._deferred = fetch(flags)

    def names(self, when: When) -> list[str]:
        """The parameters, each once, in the order in which they were found.

        Waits until the flags are here.
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
    """The names whose flag, on the CPU, is not zero."""
    return [names[i] for i in flags.nonzero().flatten().tolist()] if flags.any() else []


def known_finite(span: Tensor) -> bool:
    """Whether the extremes are finite; NaN is an extreme. False on a GPU, without a wait."""
    if not span.numel():
        return True
    return span.device.type == "cpu" and all(map(math.isfinite, torch.aminmax(span)))
