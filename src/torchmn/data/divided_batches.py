"""What loaders have handed out: the parts of batches, pass by pass, for who trains with them.

A loader of ours writes down the samples of each batch, this rank's and those of all ranks, as it
draws them, and counts the batches as the script receives them. An optimizer over the same
communicator looks there for what its step is of; neither knows the other.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torchmn.data import rank_seeds

if TYPE_CHECKING:
    from torchmn.comm import Communicator


class LoaderPass:
    """One ``for`` over a loader, or over its batch sampler alone. Local.

    It does not keep the loop alive, and so knows when the script has left it.

    Args:
        batches: those of the communicator; passes over a loader of ours that hand out batches to
            train with are among them.
        loader: its number.
        is_of_loader: whether a loader of ours counts what the script receives. Else what is drawn
            counts, which may be ahead of the script.
    """

    def __init__(self, batches: DividedBatches, loader: int, *, is_of_loader: bool) -> None:
        self.loader, self.is_of_loader = loader, is_of_loader
        self.number = 0
        """Among the passes of the communicator, from its first batch to train with on."""
        self.is_in_step: bool | None = None
        """Whether the loop trains with each batch before it requests the next one; None until the
        first exchange."""
        self.is_fetched_here = False
        """Whether this process fetches the batches, and not workers."""
        self.num_drawn = self.num_received = 0
        self.is_exhausted = self.has_ended = False
        """Whether a batch after the last one was requested: of the sampler, and by the script."""
        self.thread = 0
        """That in which the last batch was received."""
        self.loop: weakref.ref[object] | None = None
        """What the script holds on to as long as it is in the pass."""
        self.streams = rank_seeds.current()
        self._batches = batches
        self._own, self._all = array("q"), array("q")

    @property
    def was_left(self) -> bool:
        """Whether nothing holds its iterator any more: no batch of it will be requested."""
        return self.loop is not None and self.loop() is None

    @property
    def is_over(self) -> bool:
        """Whether the script has received all that it will receive of it."""
        return self.has_ended or self.was_left

    def add(self, num_own: int, num_all: int) -> None:
        """The next batch to train with, as it is drawn: samples of this rank and of all ranks."""
        if self.is_of_loader and not self._own:
            self._batches.begin(self)
        self._own.append(num_own)
        self._all.append(num_all)

    @property
    def num_parts(self) -> int:
        """Batches to train with that the script has received."""
        return min(self.num_received, len(self._own))

    def parts(self, first: int = 0) -> list[tuple[int, int]]:
        """The samples of the batches received from ``first`` on: of this rank and of all ranks."""
        last = self.num_parts
        return [*zip(self._own[first:last], self._all[first:last], strict=True)]


class Loop(NamedTuple):
    """A loop under way that trains with the batches of a loader, on this rank."""

    loader: int
    """The number of the loader, the same on all ranks."""
    number: int
    """The number of the pass over the data, on this rank."""
    num_received: int
    """Batches of this pass that the loop has received."""
    thread: int
    """The thread that requests the batches."""

    def __str__(self) -> str:
        return f"batch {self.num_received} of loader {self.loader}"


_MAX_KEPT = 32
"""Passes that are over and may have been kept: a script that never trains with them goes on."""


class DividedBatches:
    """The loaders of a communicator, and what they have handed out to train with. Local."""

    def __init__(self) -> None:
        self.is_used = False
        """Whether a loader gives ranks parts of batches, which may differ in size."""
        self.passes: list[LoaderPass] = []
        """In the order in which they began, as far as a step may be of their batches."""
        self._num_loaders = self._num_passes = 0
        # Owners and their methods. Not as WeakMethod, which fails where the collector meets it.
        self._when_used: list[tuple[weakref.ref[Any], Callable[[Any], None]]] = []

    def loops(self) -> list[Loop]:
        """The loops over these loaders that train and have not ended. Local."""
        return [
            Loop(each.loader, each.number, each.num_parts, each.thread)
            for each in self.passes
            if not each.is_over
        ]

    def new_loader(self) -> int:
        """The number of another loader, from 0, the same on all ranks."""
        self._num_loaders += 1
        return self._num_loaders - 1

    def note(self) -> None:
        """A loader divides batches: let those know that have asked. All ranks do, or none."""
        self.is_used = True
        while self._when_used:
            owner, method = self._when_used.pop(0)
            if (made := owner()) is not None:
                method(made)

    def when_used(self, owner: object, method: Callable[[Any], None]) -> None:
        """Call ``method(owner)`` at `note`, or now if that was. The owner is not kept alive."""
        self._when_used.append((weakref.ref(owner), method))
        if self.is_used:
            self.note()

    def begin(self, one_pass: LoaderPass) -> None:
        """A pass has its first batch to train with."""
        for over in [each for each in self.passes if each.is_over][:-_MAX_KEPT]:
            self.passes.remove(over)
        one_pass.number = self._num_passes = self._num_passes + 1
        self.passes.append(one_pass)

    def settle(self) -> None:
        """A step is of the batch in hand: what came before it was kept by no script."""
        self.passes = [each for each in self.passes if not each.is_over]


_known: weakref.WeakKeyDictionary[Communicator, DividedBatches] = weakref.WeakKeyDictionary()


def divided_batches(comm: Communicator) -> DividedBatches:
    """What loaders divide among the ranks of a communicator. Local."""
    return _known.setdefault(comm, DividedBatches())
