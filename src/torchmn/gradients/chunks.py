"""Buckets cut into chunks: what leaves at once.

Without a size a chunk is a bucket. With one, large parameters are cut as well: by a whole layer of
10 MB everything behind it would wait. Chunks get smaller towards the first parameters, which are
needed first when the model runs again and should not wait for others.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from torchmn.communicators.allreduce import ReduceBlock
from torchmn.compression import Codec, Layout, StripeCodec
from torchmn.gradients.buckets import Bucket
from torchmn.units import KiB

_FIRST_BYTES = 128 * KiB  # of the chunk of the first parameters; each before it is twice as large
_GRAIN = 1024  # elements; chunks begin at a multiple of it in their parameter


@dataclass(eq=False)
class Chunk:
    """A part of a bucket that leaves at once, and the parameters that have elements in it."""

    index: int
    cargo: ReduceBlock
    parameters: list[nn.Parameter]
    num_ready: int = field(default=0)
    """How many of the parameters are packed."""

    @property
    def is_full(self) -> bool:
        """Whether all its gradients are there."""
        return self.num_ready == len(self.parameters)


def cut_into_chunks(
    buckets: Sequence[Bucket], chunk_bytes: int | None, codec: Codec | None
) -> list[Chunk]:
    """The chunks of all buckets, in the order of the buffers' memory.

    Cut at multiples of a codec's blocks, which makes what an element is encoded to independent of
    the cut, or between parameters where a codec needs them whole. A pure function.
    """
    grain = _grain(codec)
    size = _FIRST_BYTES
    parts: list[tuple[Bucket, int, int]] = []
    for bucket in reversed(buckets):
        stop = bucket.buffer.numel()
        while True:
            start = 0
            if chunk_bytes is not None:
                size = min(size, chunk_bytes)
                numel = size // bucket.buffer.itemsize
                start = _cut_below(bucket.cargo.layout, stop - numel, grain)
                start = 0 if start < numel // 4 else start  # not worth a message of its own
                size *= 2 if bucket.parameters else 1  # not for the footer's
            parts.append((bucket, start, stop))
            if start == 0:
                break
            stop = start
    return [
        Chunk(index, _cargo(bucket, start, stop), _members(bucket, start, stop))
        for index, (bucket, start, stop) in enumerate(reversed(parts))
    ]


def _grain(codec: Codec | None) -> int:
    """How many elements of a parameter stay together; 0: all."""
    if codec is None:
        return _GRAIN
    if codec.needs_whole_parameters or not isinstance(codec, StripeCodec):
        return 0
    return math.lcm(codec.block_length, _GRAIN)


def _cut_below(layout: Layout, position: int, grain: int) -> int:
    """The last allowed cut at or before an element."""
    at = bisect.bisect_right(layout.segments, position, key=lambda segment: segment.start) - 1
    if at < 0:
        return 0
    segment = layout.segments[at]
    if segment.is_small or not grain:
        return segment.start
    steps = (min(position, segment.end) - segment.start) // grain
    return segment.start + steps * grain


def _cargo(bucket: Bucket, start: int, stop: int) -> ReduceBlock:
    is_whole = start == 0 and stop == bucket.buffer.numel()
    return bucket.cargo if is_whole else bucket.cargo.between(start, stop)


def _members(bucket: Bucket, start: int, stop: int) -> list[nn.Parameter]:
    if start == 0 and stop == bucket.buffer.numel():
        return list(bucket.parameters)
    return [
        parameter
        for parameter, (first, last) in zip(bucket.parameters, bucket.spans, strict=True)
        if first < stop and (last > start or first == last >= start)
    ]
