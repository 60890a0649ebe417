"""The parts of batches that loaders of `torchmn.scatter_loader` give to this rank for training."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable


class PassParts:
    """Samples of each part of one pass, and of its batch over all ranks. Local.

    Args:
        num_received: how many of them the loop has received: workers draw some in advance.
        has_ended: whether the loop has requested one more than there are.
    """

    def __init__(self, num_received: Callable[[], int], has_ended: Callable[[], bool]) -> None:
        self.num_received = num_received
        self.has_ended = has_ended
        self._own, self._all = array("q"), array("q")

    def add(self, num_own: int, num_all: int) -> None:
        """The next part, as it is drawn."""
        self._own.append(num_own)
        self._all.append(num_all)

    def __len__(self) -> int:
        return len(self._own)

    def between(self, first: int, last: int) -> tuple[int, int]:
        """The samples of parts ``first`` to ``last``, exclusive: of this rank and of all ranks."""
        return sum(self._own[first:last]), sum(self._all[first:last])


class BatchParts:
    """Those of all passes that are under way, by the number of the pass. Local."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._passes: dict[int, weakref.ref[PassParts]] = {}

    def add_pass(self, parts: PassParts) -> None:
        """A pass begins. It is known as long as the loader keeps it."""
        number = self._num_passes = self._num_passes + 1
        self._passes[number] = weakref.ref(parts, lambda _: self._passes.pop(number, None))

    def under_way(self) -> dict[int, PassParts]:
        """By number, in the order in which they began; without those that gave no part yet."""
        found = {number: reference() for number, reference in list(self._passes.items())}
        return {number: parts for number, parts in found.items() if parts}
