"""What loaders of `torchmn.scatter_loader` divide among the ranks of a communicator."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from typing import NamedTuple

from torchmn.control.script import failure_notes


class Loop(NamedTuple):
    """A loop under way that trains with the batches of a loader, on this rank."""

    loader: int
    """The number of the loader, the same on all ranks."""
    number: int
    """The number of the pass over the data, on this rank."""
    num_received: int
    """Batches of this pass that the loop has received."""
    thread: int | None
    """The thread that requests the batches; None if it is not known."""

    def __str__(self) -> str:
        return f"batch {self.num_received} of loader {self.loader} of scatter_loader"


class PassParts:
    """Samples of each part of one pass, and of its batch over all ranks. Local.

    Args:
        num_received: how many of them the loop has received: workers draw some in advance.
        has_ended: whether the loop has requested one more than there are.
    """

    def __init__(self, num_received: Callable[[], int], has_ended: Callable[[], bool]) -> None:
        self.loader = 0
        """The number of the loader."""
        self.thread: Callable[[], int | None] = lambda: None
        """The thread of the loop."""
        self.num_received = num_received
        self.has_ended = has_ended
        self._own, self._all = array("q"), array("q")
        failure_notes.add(self)

    def add(self, num_own: int, num_all: int) -> None:
        """The next part, as it is drawn."""
        self._own.append(num_own)
        self._all.append(num_all)

    def __len__(self) -> int:
        return len(self._own)

    def between(self, first: int, last: int) -> tuple[int, int]:
        """The samples of parts ``first`` to ``last``, exclusive: of this rank and of all ranks."""
        return sum(self._own[first:last]), sum(self._all[first:last])

    def failure_note(self) -> str:
        """The size of the part that the loop has in hand, where it may explain an exception."""
        num = 0 if self.has_ended() else self.num_received()
        own, whole = self.between(num - 1, num) if num else (0, 0)
        if own > 1 or own == whole:
            return ""
        return (
            f"torchmn: this rank has {own} of the {whole} samples of this batch of scatter_loader: "
            "none to divide by, or too few for layers such as BatchNorm1d. Give the DataLoader "
            "drop_last=True, or another batch_size."
        )


class DividedBatches:
    """The loaders of a communicator, and the passes over them that are under way. Local."""

    def __init__(self) -> None:
        self.is_used = False
        """Whether loaders give ranks parts of batches, which may differ in size."""
        self._num_loaders = self._num_passes = 0
        self._passes: dict[int, weakref.ref[PassParts]] = {}
        self._when_used: list[weakref.WeakMethod[Callable[[], None]]] = []

    def note(self) -> None:
        """Set `is_used`, and let those know that have asked. All ranks do, or none."""
        self.is_used = True
        while self._when_used:
            if (method := self._when_used.pop(0)()) is not None:
                method()

    def when_used(self, method: Callable[[], None]) -> None:
        """Call a bound method, whose owner is not kept alive, at `note`."""
        self._when_used.append(weakref.WeakMethod(method))

    def new_loader(self) -> int:
        """The number of another loader, from 0, the same on all ranks."""
        self._num_loaders += 1
        return self._num_loaders - 1

    def add_pass(self, parts: PassParts) -> None:
        """A pass begins. It is known as long as the loader keeps it."""
        number = self._num_passes = self._num_passes + 1
        self._passes[number] = weakref.ref(parts, lambda _: self._passes.pop(number, None))

    def under_way(self) -> dict[int, PassParts]:
        """Passes by number, as they began, without evaluations and those that gave no part yet."""
        found = {number: reference() for number, reference in list(self._passes.items())}
        return {number: parts for number, parts in found.items() if parts}

    def loops(self) -> list[Loop]:
        """The loops over these loaders that train and have not ended. Local."""
        return [
            Loop(parts.loader, number, parts.num_received(), parts.thread())
            for number, parts in self.under_way().items()
            if not parts.has_ended()
        ]
