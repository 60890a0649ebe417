"""The positions of parameters in a bucket, and where a bucket may be split into stripes.

A stripe is the part of a bucket that one rank reduces. Codecs work in blocks that are counted from
the start of each parameter, and buckets are split at block boundaries. So the decoded value of an
element depends neither on the distribution of parameters to buckets nor on the number of stripes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

SMALL_NUMEL = 1024
VECTOR_NUMEL = 65_536


def is_small(shape: Sequence[int]) -> bool:
    """Whether a parameter is so small that it is sent uncompressed.

    These are parameters with fewer than 1024 elements, and vectors of up to 65,536 elements, such
    as biases and the scales of normalization layers.
    """
    numel = math.prod(shape)
    return numel < SMALL_NUMEL or (len(shape) <= 1 and numel <= VECTOR_NUMEL)


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of one parameter.

    It begins at element ``start`` of the buffer and at element ``offset`` of the parameter, counted
    in the order of the buffer's memory.

    Example:
        >>> Segment("weight", start=8, numel=6, shape=(2, 3)).end
        14
    """

    name: str
    start: int
    numel: int
    offset: int = 0
    is_small: bool = False
    shape: tuple[int, ...] | None = None
    """The shape of the whole parameter, with dims in the order of memory; None if not known."""

    @property
    def end(self) -> int:
        """The first element of the buffer after the segment."""
        return self.start + self.numel

    @property
    def is_whole(self) -> bool:
        """Whether the segment is a whole parameter of known shape."""
        return self.shape is not None and self.offset == 0 and math.prod(self.shape) == self.numel

    def part(self, first: int, last: int) -> Segment:
        """Elements ``first`` to ``last`` (exclusive) of this segment."""
        return replace(
            self, start=self.start + first, numel=last - first, offset=self.offset + first
        )

    def nearest_boundary(self, position: float, block_length: int) -> int:
        """The allowed place of a split that is nearest to ``position``, in elements of the segment.

        0 and numel are always allowed. A small parameter is never split.
        """
        if position >= self.numel:  # also where the nearest multiple of a block is 0
            return self.numel
        # Counted from the start of the parameter, not of this segment: where a bucket or an earlier
        # stripe cuts the parameter must not move its blocks.
        step = self.numel if self.is_small else block_length
        offset = 0 if self.is_small else self.offset
        boundary = round((offset + position) / step) * step - offset if step else 0
        return min(max(boundary, 0), self.numel)


@dataclass(frozen=True)
class Layout:
    """The segments of a bucket, or of a stripe of it, in the order of the buffer.

    ``dtype`` is that of the buffer. Equal layouts share residuals, so alternating sets of buckets
    do. Elements of the buffer between segments belong to no parameter.

    Example:
        >>> layout = Layout.of([("weight", 0, (2, 3)), ("bias", 6, (2,))], torch.float32)
        >>> layout.numel, [segment.name for segment in layout.segments]
        (8, ['weight', 'bias'])
    """

    segments: tuple[Segment, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, int, Sequence[int]]], dtype: torch.dtype) -> Layout:
        """The layout of a buffer that holds whole parameters: (name, start, shape) of each.

        Empty parameters are left out. For a complex parameter pass the shape of `view_as_real`.
        """
        return cls(
            tuple(
                Segment(name, start, math.prod(shape), is_small=is_small(shape), shape=tuple(shape))
                for name, start, shape in sorted(parameters, key=lambda item: item[1])
                if math.prod(shape)
            ),
            dtype,
        )

    @cached_property
    def begin(self) -> int:
        """The first element of the buffer that belongs to the layout."""
        return self.segments[0].start if self.segments else 0

    @cached_property
    def end(self) -> int:
        """The first element of the buffer after the layout."""
        return self.segments[-1].end if self.segments else 0

    @property
    def span(self) -> int:
        """The number of elements from `begin` to `end`, including those between segments."""
        return self.end - self.begin

    @cached_property
    def numel(self) -> int:
        """The number of elements that belong to parameters."""
        return sum(segment.numel for segment in self.segments)

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of sums and residuals: float64 for float64, otherwise float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    # Layouts are keys of dicts that are looked up for every bucket in every step; the generated
    # __hash__ would hash all segments each time.
    @cached_property
    def _hash(self) -> int:
        return hash((self.segments, self.dtype))

    def __hash__(self) -> int:
        return self._hash

    def split(
        self, num_stripes: int, block_length: int, *, small_cost: float = 1.0
    ) -> tuple[Layout, ...]:
        """Split into stripes of about equal cost, at block boundaries and between parameters.

        ``small_cost`` is the cost of an element of a small parameter relative to other elements,
        such as 32 for 1 bit. Stripes may be empty. A pure function: the same on all ranks.
        """
        costs = [s.numel * (small_cost if s.is_small else 1.0) for s in self.segments]
        total = sum(costs)
        stripes: list[list[Segment]] = [[] for _ in range(num_stripes)]
        done = 0.0
        for segment, cost in zip(self.segments, costs, strict=True):
            boundaries = [
                segment.nearest_boundary(
                    (total * k / num_stripes - done) / cost * segment.numel, block_length
                )
                for k in range(1, num_stripes)
            ]
            for stripe, first, last in zip(
                stripes, [0, *boundaries], [*boundaries, segment.numel], strict=True
            ):
                if last > first:
                    stripe.append(segment.part(first, last))
            done += cost
        return tuple(Layout(tuple(stripe), self.dtype) for stripe in stripes)

    def between(self, start: int, stop: int) -> Layout:
        """The layout of elements ``start`` to ``stop`` (exclusive), which may be inside of blocks.

        If a block is divided, its parts are quantized separately, so decoded values depend on the
        place of the division. The segments' `start` still counts from the start of the buffer.
        """
        return Layout(
            tuple(
                segment.part(max(start - segment.start, 0), min(stop, segment.end) - segment.start)
                for segment in self.segments
                if segment.start < stop and segment.end > start
            ),
            self.dtype,
        )

    def moved(self, distance: int, dtype: torch.dtype | None = None) -> Layout:
        """The same segments, moved by ``distance`` elements, in a buffer of ``dtype``."""
        segments = tuple(replace(s, start=s.start + distance) for s in self.segments)
        return Layout(segments, dtype or self.dtype)
