"""The batches of loaders to which an exchange belongs, and the weight that follows from them.

If a rank's loss is the mean over its part of a batch, its weight must be the size of that part,
which the loaders know. A loop that trains with each batch before it requests the next one steps
with the batches received since the previous exchange. If the first exchange of a pass finds several
new batches (they are kept in a list, requested early, or accumulated), the samples that forward
counted are the weight, and must be those of parts that were handed out. Parts of different sizes in
one step have no weight that is right for each of them, and are refused.

Ranks compare two numbers that are equal if each trained with its own part of the same batches:
which batches were received, and which multiple of the part forward has seen.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torchmn.base.errors import UsageError
from torchmn.data.divided_batches import DividedBatches, LoaderPass, Part, have_one_proportion

# After this many exchanges of one batch each, one of several means that a batch was left out.
_MIN_REGULAR = 2


class Counted(NamedTuple):
    """The samples that the model's forward has seen since the previous exchange."""

    num_samples: float = 0.0
    num_forwards: int = 0
    squares: float = 0.0  # sum over forward passes of the squared number of samples


NOTHING = Counted()


class Share(NamedTuple):
    """This rank's part of the batches of one exchange."""

    weight: float  # in samples
    num_counted: float = 0.0
    # The parts of the batches since the previous exchange, or the latest of each loader.
    parts: Sequence[Part] = ()
    # A number that is equal on ranks whose forward saw the same multiple of their part, and saw
    # all of it or not; None if unknown.
    seen: int | None = None
    # Whether no weight can be right, whatever the other ranks have.
    is_miscounted: bool = False
    # Whether that is because the parts are of several loaders and in no common proportion.
    are_of_several: bool = False
    # Samples of all ranks in the batches whose parts are the weight; None if unknown.
    num_all: float | None = None


@dataclass
class _Found:
    """The loops over loaders, and their batches, to which an exchange belongs."""

    passes: list[LoaderPass] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)  # received since the previous exchange
    is_kept: bool = True  # whether batches are not trained with one by one as they are received
    is_of_thread: bool = True  # whether all were received in the thread that trains
    # Number of batches that unfinished loops received, and a number that tells which.
    num_new: int = 0
    number: int = 0


class StepBatches:
    """Follows the batches of a communicator's loaders for one optimizer, exchange by exchange.

    Args:
        batches: the batches of the loaders.
        size: the number of ranks.
    """

    def __init__(self, batches: DividedBatches, size: int) -> None:
        # A number for the batches received for the last exchange, and whether ranks compare it.
        # They do not if their loops may be at different batches.
        self.number, self.is_number_compared = 0, False
        self._batches, self._size = batches, size
        # Batches may be received in another thread, ahead of the one that trains.
        self._thread = threading.get_ident()
        # By pass: the number of batches that the loop had received at the previous exchange.
        self._before: dict[LoaderPass, int] = {}
        for each in batches.passes:
            if not each.is_over:  # the batch in hand may be the first that this optimizer sees
                self._before[each] = max(0, each.num_received - 1)
            elif each.is_in_step:
                self._before[each] = each.num_received
        self._last: _Found | None = None
        self._last_share = Share(0.0)
        self._num_waiting = 0  # estimated number of kept batches that were in no exchange yet
        self._num_regular: int | None = 0  # exchanges of one batch; None if one was of several
        self._step = 0
        self._first: list[LoaderPass] = []  # the passes of the first exchange

    @property
    def is_in_first_pass(self) -> bool:
        """Whether the last exchange belonged to passes over loaders of the first exchange."""
        return self._last is None or all(each in self._first for each in self._last.passes)

    @property
    def places(self) -> str:
        """The positions of unfinished loops over loaders, for error messages."""
        places = [str(each) for each in self._before if not each.is_over]
        return ", ".join(places) or "no loop over a loader"

    def raise_if_stream_is_elsewhere(self, rank_label: str) -> None:
        """Raise UsageError if another thread reads a stream than this one, which trains. Local."""
        thread = threading.get_ident()
        for each in self._batches.passes:
            is_read = each.is_of_stream and not each.is_over
            if is_read and each.thread != thread and self._size > 1:
                raise UsageError(
                    f"{rank_label}: another thread than the one that trains reads a stream of "
                    "scatter_loader. The ranks communicate for every batch of it, and would do so "
                    "while they exchange gradients, in another order on each. Iterate over it in "
                    "the thread that trains; to read ahead give its DataLoader num_workers=."
                )

    def look(self, counted: Counted) -> Share | None:
        """Return the share of the next exchange, without recording it. Local.

        None if the exchange does not belong to batches of loaders.
        """
        found = self._find()
        return self._share(found, counted) if found.passes else None

    def take(
        self, counted: Counted, step: int = 0, *, is_used: bool = True, is_joining: bool = False
    ) -> Share | None:
        """Return the share of an exchange that begins, as `look`, and record it. Local.

        Args:
            counted: the samples that forward has seen.
            step: number of steps of the optimizer so far.
            is_used: whether this rank had a backward pass and no weight was given.
            is_joining: whether ranks may receive different numbers of batches.
        """
        found, batches = self._find(), self._batches
        # Steps without an exchange in between: what was regular before tells nothing.
        num_regular = 0 if step > self._step + 1 else self._num_regular
        self._step, self.number, self.is_number_compared = step, found.number, False
        if not is_joining:
            self._num_regular = None
            if num_regular is not None and found.is_of_thread:
                self.is_number_compared = found.num_new <= 1 or num_regular >= _MIN_REGULAR
                if found.num_new <= 1:
                    self._num_regular = num_regular + found.num_new
        if not found.passes:
            return None
        share = self._share(found, counted)
        if found.is_kept:
            self._num_waiting = max(0, self._num_waiting + len(found.parts) - 1)
        elif found.num_new and len(batches.passes) > 1:
            batches.settle()
        self._before = {}
        for each in batches.passes:
            self._before[each] = each.num_received
        if self._last is None:
            self._first = found.passes
        self._last, self._last_share = found, share
        # A rank without a gradient has no weight, whatever the others have.
        return share if is_used or counted.num_samples else Share(0.0)

    def _find(self) -> _Found:
        found, last = _Found(), self._last
        new: dict[LoaderPass, list[Part]] = {}
        num_loops = 0
        for each in self._batches.passes:
            start, end = self._before.get(each, 0), each.num_received
            if not (parts := each.parts(start, end)):
                continue
            new[each] = parts
            found.is_of_thread &= each.thread == self._thread
            if not each.is_over:
                num_loops += 1
                found.num_new += len(parts)
                found.number += (2 * each.loader + 1) * len(parts)
                if each.is_in_step is None:
                    each.is_in_step = end == 1 and found.is_of_thread and not self._num_waiting
        if num_loops < len(new):  # of loops that go on, or else of those that have just ended
            chosen = {each: new[each] for each in new if num_loops and not each.is_over}
            new = chosen or {each: new[each] for each in new if each.is_in_step} or new
        for each, parts in new.items():
            found.passes.append(each)
            found.parts += parts
            found.is_kept &= not each.is_in_step
        if not new and last is not None:  # of the same batch, or of one that was kept
            found.passes, found.is_of_thread = last.passes, last.is_of_thread
            if not last.is_kept and not all(each.is_over for each in last.passes):
                found.parts, found.is_kept = last.parts, False
        return found

    def _share(self, found: _Found, counted: Counted) -> Share:
        if found.is_kept:
            return self._of_kept(found, counted)
        num, parts = counted.num_samples, found.parts
        weight, total, proportion = parts[-1]
        own, num_all = weight, total
        if len(parts) > 1:
            if have_one_proportion(parts, self._size):
                weight = sum(each.own for each in parts)
                num_all = sum(each.all for each in parts)
            elif len(found.passes) > 1:
                latest = [each.latest for each in found.passes]
                return Share(weight, num, latest, is_miscounted=True, are_of_several=True)
        # Else batches were left out, or were accumulated, which then shows.
        is_all = num >= weight
        if is_all:
            own = weight
        if not (num and own):
            return Share(weight, num, parts, is_miscounted=num > 0, num_all=num_all)
        multiple, rest = divmod(num, own)
        is_even = not proportion and total % self._size == 0
        if is_even and rest:  # all may see the same constants
            multiple = num - own
        elif is_even and is_all:  # one rank may see its part more often
            multiple = 1
        seen = 4 * int(multiple) + 2 * (rest > 0) + is_all
        is_miscounted = rest > 0 and not is_even
        return Share(weight, num, parts, seen, is_miscounted, num_all=num_all)

    def _of_kept(self, found: _Found, counted: Counted) -> Share:
        """The share of batches that are kept: its weight is the count of forward.

        It is miscounted unless it can be the count of parts that were handed out.
        """
        parts, sizes, num = found.parts, self._batches.sizes, counted.num_samples
        latest = parts or self._last_share.parts
        # What a thread requests is not the same on all ranks at a step.
        if found.is_of_thread and have_one_proportion(sizes, self._size):
            seen = None
            if found.num_new:  # else a look at a batch, perhaps: the loop has ended
                seen = self._share(replace(found, is_kept=False), counted).seen
            if seen is not None and seen % 2 == 0:  # of some of them: how many are left
                received, total = sum(part.own for part in parts), sum(part.all for part in parts)
                seen = 2 * round(total - num * total / received)
            return Share(latest[-1].own, num, latest, seen, num_all=latest[-1].all)
        if not counted.num_forwards and not parts:
            return self._last_share  # a second backward pass of the same forward pass
        each = num / max(1, counted.num_forwards)
        is_known = any(each % size.own == 0 if size.own else not each for size in sizes)
        is_known &= counted.num_forwards * counted.squares == num**2  # all saw as many
        return Share(num, num, latest, is_miscounted=not is_known)
