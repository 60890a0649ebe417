"""Which parameters had values that are not finite."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from torchmn.comm.codecs.layout import Layout

When = Literal["encoding", "decoding"]


class NonfiniteTracker:
    """A record of one exchange. Local.

    What was found in *encoding* or flushing as a worker is this rank's own gradient; what was found
    in *decoding* is known to all ranks that decode the same bytes. Flags of a GPU stay there until
    `names` is called.
    """

    def __init__(self) -> None:
        self._names: dict[When, list[str]] = {"encoding": [], "decoding": []}
        self._unread: list[tuple[When, Layout, Tensor]] = []

    def record_flags(self, when: When, stripe: Layout, flags: Tensor) -> None:
        """``flags`` (num_segments,): not zero where a segment has values that are not finite."""
        if flags.device.type == "cpu":
            self._read(when, stripe, flags)
        else:
            self._unread.append((when, stripe, flags))

    def scan(self, when: When, stripe: Layout, span: Tensor) -> None:
        """Scan ``span`` (stripe.span,), and every parameter in it if something is not finite."""
        if not known_finite(span):
            parts = (span[s.start - stripe.begin : s.end - stripe.begin] for s in stripe.segments)
            flags = torch.stack([~torch.isfinite(part).all() for part in parts])
            self.record_flags(when, stripe, flags)

    def record(self, when: When, name: str) -> None:
        """Record one parameter by its name."""
        self._names[when].append(name)

    def names(self, when: When) -> list[str]:
        """The parameters, each once, in the order in which they were found. Waits for the GPU."""
        for item in self._unread:
            self._read(*item)
        self._unread.clear()
        return list(dict.fromkeys(self._names[when]))

    def clear(self) -> None:
        """Begin a new exchange."""
        self._names = {"encoding": [], "decoding": []}
        self._unread.clear()

    def _read(self, when: When, stripe: Layout, flags: Tensor) -> None:
        for position in flags.nonzero().flatten().tolist() if flags.any() else ():
            self._names[when].append(stripe.segments[position].name)


def known_finite(span: Tensor) -> bool:
    """Whether the extremes are finite; NaN is an extreme. False on a GPU, without a wait."""
    if not span.numel():
        return True
    return span.device.type == "cpu" and all(map(math.isfinite, torch.aminmax(span)))
