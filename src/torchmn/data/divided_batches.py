"""A record of the parts of batches that loaders have handed out, for optimizers that need them.

A loader of torchmn notes the samples of each batch, this rank's and those of all ranks, when it
draws the batch, and counts the batches that the script receives. An optimizer over the same
communicator reads here which batches a step uses; loader and optimizer do not know each other.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from torchmn.data import rank_seeds
from torchmn.data.batch_shares import in_proportion

if TYPE_CHECKING:
    from torchmn.comm import Communicator


class Part(NamedTuple):
    """The samples of a batch to train with."""

    own: int
    """Of this rank."""
    all: int
    """Of all ranks."""
    proportion: int = 0
    """0 if the batch was divided as evenly as possible; else the number of `proportion_of`."""


def proportion_of(sizes: Sequence[int]) -> int:
    """A number for the proportion of ranks' parts, the same on all ranks: see `Part`. Local."""
    if [*sizes] == in_proportion(sum(sizes), [1] * len(sizes)):
        return 0
    return 1 + zlib.crc32(repr([size // math.gcd(*sizes) for size in sizes]).encode())


def have_one_proportion(parts: Collection[Part], size: int) -> bool:
    """Whether each of ``size`` ranks has the same fraction of every one of these batches. Local.

    The parts of a batch that was divided evenly differ by at most one sample among ranks.
    """
    if len({part.proportion for part in parts}) > 1:
        return False
    is_even = all(part.proportion == 0 for part in parts)
    totals = {part.all for part in parts}
    return not is_even or len(totals) == 1 or all(total % size == 0 for total in totals)


class LoaderPass:
    """One ``for`` over a loader, or over its batch sampler alone. Local.

    Args:
        batches: the record of the communicator, which lists passes with batches to train with.
        loader: the number of the loader, the same on all ranks.
        is_of_loader: whether a loader of torchmn counts what the script receives. If not, batches
            count when they are drawn, which is ahead of the script where workers prefetch.
        is_of_stream: whether ranks communicate for every batch.
    """

    def __init__(
        self,
        batches: DividedBatches,
        loader: int,
        *,
        is_of_loader: bool,
        is_of_stream: bool = False,
    ) -> None:
        self.loader, self.is_of_loader, self.is_of_stream = loader, is_of_loader, is_of_stream
        # Whether the loop trains with each batch before it requests the next one; None until the
        # first exchange.
        self.is_in_step: bool | None = None
        self.is_fetched_here = False  # whether this process fetches the batches, and not workers
        self.num_drawn = self.num_received = 0
        # Whether a batch after the last one was requested: of the sampler, and by the script.
        self.is_exhausted = self.has_ended = False
        self.was_left = False  # whether nothing holds its iterator any more
        self.is_over = False  # either: the script will receive no more of it
        self.thread = 0  # that in which the last batch was received
        # Called when the script requests a batch, with the number of those that it has received.
        self.before_next: Callable[[int], None] | None = None
        self.streams = rank_seeds.current()
        self._parts: list[Part] = []  # to train with, as they were drawn
        self._batches = batches

    def add(self, num_own: int, num_all: int, proportion: int = 0) -> None:
        """Note the next batch to train with, when it is drawn; see `Part`."""
        if not self._parts:
            self._batches.begin(self)
        part = Part(num_own, num_all, proportion)
        # Equal parts are one object: a pass may have millions of batches.
        self._parts.append(self._batches.sizes.setdefault(part, part))

    def parts(self, begin: int, end: int) -> list[Part]:
        """Parts number ``begin`` .. ``end - 1`` of those to train with."""
        return self._parts[begin:end]

    @property
    def num_parts(self) -> int:
        """Number of batches to train with that the script has received."""
        return min(self.num_received, len(self._parts))

    @property
    def latest(self) -> Part:
        """The last part to train with that the script has received."""
        return self._parts[self.num_parts - 1]

    def __str__(self) -> str:
        return f"batch {self.num_parts} of loader {self.loader}"


class PassFact(Protocol):
    """Something that is the same on all ranks. Both methods are local, and called on all ranks.

    A pass over a loader compares it with rank 0 when it begins. The broadcast of the order of
    samples carries it, so that nothing is sent for it. A script that exchanges nothing in its steps
    has no other collective that could.
    """

    def at_pass(self) -> Any:
        """The value to compare when a pass begins, of numbers and strings; None for nothing."""

    def compare(self, comm: Communicator, own: Any, of_rank_0: Any) -> None:
        """Raise or warn if this rank's value differs from rank 0's; neither is None."""


class DividedBatches:
    """The loaders of a communicator, and what they have handed out to train with. Local."""

    def __init__(self) -> None:
        self.is_used = False  # whether a loader gives ranks parts, which may differ in size
        self.passes: list[LoaderPass] = []  # in the order in which they began
        self.sizes: dict[Part, Part] = {}  # each part of a batch to train with, by itself
        self.facts: list[weakref.ref[PassFact]] = []  # all ranks add theirs in the same order
        self._num_loaders = 0
        # Owners and their methods. Not as WeakMethod, which fails where the collector meets it.
        self._when_used: list[tuple[weakref.ref[Any], Callable[[Any], None]]] = []

    def new_loader(self) -> int:
        """Number a new loader, from 0, the same on all ranks."""
        self._num_loaders += 1
        return self._num_loaders - 1

    def note(self) -> None:
        """Note that a loader divides batches; call what `when_used` has. On all ranks or none."""
        self.is_used = True
        while self._when_used:
            owner, method = self._when_used.pop(0)
            if (made := owner()) is not None:
                method(made)

    def when_used(self, owner: object, method: Callable[[Any], None]) -> None:
        """Call ``method(owner)`` at the first `note`, or now if it was. Does not keep the owner."""
        self._when_used.append((weakref.ref(owner), method))
        if self.is_used:
            self.note()

    def begin(self, one_pass: LoaderPass) -> None:
        """Add a pass when it has its first batch to train with."""
        self.settle()
        self.passes.append(one_pass)

    def settle(self) -> None:
        """Forget the passes that are over; of these only the sizes of batches remain known."""
        self.passes = [each for each in self.passes if not each.is_over]

    def facts_now(self, size: int) -> dict[int, Any]:
        """The values that ``size`` ranks compare in the pass that begins, by number of the fact.

        There are none if the pass does not train.
        """
        if size == 1 or not torch.is_grad_enabled():
            return {}
        now = {
            number: fact.at_pass()
            for number, found in enumerate(self.facts)
            if (fact := found()) is not None
        }
        return {number: value for number, value in now.items() if value is not None}

    def compare_facts(self, comm: Communicator, own: dict[int, Any], of_rank_0: Any) -> None:
        """Compare the values of this rank with those of rank 0, both from `facts_now`."""
        for number, value in of_rank_0:
            fact = self.facts[number]() if number in own else None
            if fact is not None:
                fact.compare(comm, own[number], value)


_known: weakref.WeakKeyDictionary[Communicator, DividedBatches] = weakref.WeakKeyDictionary()


def divided_batches(comm: Communicator) -> DividedBatches:
    """The record of a communicator's loaders, made at the first call. Local."""
    return _known.setdefault(comm, DividedBatches())
