"""What a step is of: this rank's parts of the batches that loaders have handed out since the last.

With the mean of a rank's part as its loss, the weights of ranks must be as their parts p_i of the
batch of P samples. The loaders know the parts. What the step is of is known as well where the loop
trains with each batch before it requests the next one: the batches received since the exchange
before. A model that sees other samples in the same loop is found by what its forward counts, c_i:

    P sum_i c_i^2 / p_i  >=  (sum_i c_i)^2,   with equality where all c_i = k p_i

so that one number per rank, summed in the footer of the exchange, shows it on all ranks. Where all
parts have one size there is nothing to weight, and nothing is compared.

Where the first exchange finds more than one batch (batches are kept in a list, requested early, or
accumulated), the count is the weight, and must be one of the parts that were handed out, each once,
or all of them again. Parts of batches of several sizes in one step have no
weight that is right for each of them, and are refused.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchmn.data.divided_batches import DividedBatches, LoaderPass

_TOLERANCE = 1e-5
"""Relative, of the square of the sum: float32 rounds sums."""
_UNFIT = 1e20
NOT_COMPARED = -1e30
"""In place of `Shares.fit`, from a rank that does not compare: then none does."""
_MAX_LEFT = 16
"""Batches that were requested early, and then left out."""

Part = tuple[int, int]
"""Samples of a batch: of this rank, and of all ranks."""


class Shares(NamedTuple):
    """What the batches of loaders say of one exchange on this rank."""

    weight: float
    """In samples."""
    compared_by: BatchShares
    num_counted: float = 0.0
    """What forward has seen; the part itself if it saw nothing."""
    fit: float = NOT_COMPARED
    """c^2 / p."""
    part: Part = (0, 0)
    """p and P."""
    is_miscounted: bool = False
    """Whether the samples that forward saw are no multiple of any batch that the step may be of."""
    loaders: tuple[Part, ...] = ()
    """p and P of each loader, if several were read whose parts are in no common proportion."""

    def is_proportional(self, fit: float, num_counted: float) -> bool:
        """Whether counts are as the parts of the batch. The same on all ranks.

        Args:
            fit: the sum over ranks.
            num_counted: over all ranks.
        """
        square = num_counted**2
        return self.part[1] * fit - square <= _TOLERANCE * square


@dataclass
class _Found:
    """What the next exchange is of."""

    passes: list[LoaderPass]
    parts: list[Part]
    """Received since the exchange before; where batches are kept, all that no exchange was of."""
    is_kept: bool
    counted: Shares | None = None
    """Where batches are kept: of the last exchange with a forward pass."""


class BatchShares:
    """Follows the batches of a communicator's loaders for one optimizer, exchange by exchange.

    Args:
        batches: of the loaders.
        size: the number of ranks.
    """

    def __init__(self, batches: DividedBatches, size: int) -> None:
        self._batches, self._size = batches, size
        self._received: weakref.WeakKeyDictionary[LoaderPass, int] = weakref.WeakKeyDictionary()
        """Batches that the loop had received of each pass at the exchange before."""
        for each in batches.passes:
            if not each.is_over:  # the batch in hand may be the first that this optimizer sees
                self._received[each] = max(0, each.num_parts - 1)
            elif each.is_in_step:
                self._received[each] = each.num_parts
        self._thread = threading.get_ident()
        self._last: _Found | None = None
        self._first_passes: weakref.WeakSet[LoaderPass] | None = None
        self._has_warned = False

    @property
    def are_used(self) -> bool:
        """Whether there is a loader that divides batches. The same on all ranks."""
        return self._batches.is_used

    @property
    def is_in_first_pass(self) -> bool:
        """Whether the last exchange was of the first pass, or passes, that any was of."""
        last, first = self._last, self._first_passes
        return last is None or first is None or all(each in first for each in last.passes)

    def look(self, num_counted: float, num_forwards: int) -> Shares | None:
        """What the next exchange is of, if it is of batches of loaders. Local; notes nothing."""
        found = self._find()
        return None if found is None else self._shares(found, num_counted, num_forwards)

    def take(self, num_counted: float, num_forwards: int, *, is_used: bool = True) -> Shares | None:
        """As `look`, for an exchange that begins. Local.

        Args:
            num_counted: samples that the model's forward has seen since the exchange before.
            num_forwards: how often it was called; 0 samples are a part too.
            is_used: whether this rank had a backward pass.
        """
        found = self._last = self._find()
        if found is None:
            return None
        if not found.is_kept and any(not each.is_over for each in found.passes):
            self._batches.settle()
        for each in self._batches.passes:
            self._received[each] = each.num_parts
        if self._first_passes is None:
            self._first_passes = weakref.WeakSet(found.passes)
        shares = self._shares(found, num_counted, num_forwards)
        if not (is_used or num_counted):  # no gradient of this rank, whatever the others have
            return Shares(0.0, self)
        if shares.is_miscounted and not self.is_in_first_pass:  # too late to be refused
            if shares.fit == NOT_COMPARED:
                self.warn(miscount(num_counted))
            return shares._replace(is_miscounted=False)
        return shares

    def _find(self) -> _Found | None:
        last = self._last
        left = last.parts[-_MAX_LEFT:] if last is not None and last.is_kept else []
        new = {each: each.parts(self._received.get(each, 0)) for each in self._batches.passes}
        new = {each: parts for each, parts in new.items() if parts}
        in_hand = [each for each in new if not each.is_over]
        for each in in_hand:
            if each.is_in_step is None:
                is_first = each.num_parts == 1 and not left
                each.is_in_step = is_first and each.thread == self._thread
        passes = in_hand or [each for each in new if each.is_in_step] or [*new]
        parts = [part for each in passes for part in new[each]]
        if any(each.is_in_step for each in passes):
            return _Found(passes, parts, is_kept=False)
        if passes:
            return _Found(passes, [*left, *parts], is_kept=True)
        if last is None or (not last.is_kept and not all(each.is_over for each in last.passes)):
            return last
        if last.is_kept and last.parts:
            return replace(last)
        # What was handed out comes again, as from itertools.cycle.
        again = [part for each in last.passes for part in each.parts()]
        return _Found(last.passes, again, is_kept=True, counted=last.counted)

    def _shares(self, found: _Found, num_counted: float, num_forwards: int) -> Shares:
        parts, are_proportional = found.parts, self._have_one_proportion(found.parts)
        part = parts[0] if found.is_kept else parts[-1]
        own, total = part
        weight = own
        if found.is_kept:
            # What a thread requests is not the same on all ranks at a step.
            is_of_thread = any(each.thread != self._thread for each in found.passes)
            if is_of_thread or not are_proportional:
                return self._of_kept(found, num_counted, num_forwards)
            found.parts = parts[1:]
        elif are_proportional:
            weight = sum(each for each, _ in parts)
        elif len(found.passes) > 1:
            latest = tuple(each.parts(each.num_parts - 1)[0] for each in found.passes)
            return Shares(weight, self, num_counted, _UNFIT, part, loaders=latest)
        if are_proportional and total % self._size == 0:
            return Shares(weight, self)
        # Else batches were left out, or were accumulated, which then shows.
        counted = num_counted or own
        fit = counted**2 / own if own else _UNFIT * bool(counted)
        return Shares(weight, self, counted, fit, part, not _is_multiple(counted, own))

    def _of_kept(self, found: _Found, num_counted: float, num_forwards: int) -> Shares:
        """The count as the weight, if it is that of a batch that was kept, or of several."""
        if not num_forwards and found.counted is not None:
            return found.counted  # a second backward pass of the same forward pass
        parts = found.parts
        lengths = dict.fromkeys((1, max(1, num_forwards)))
        runs = [(i, parts[i : i + n]) for n in lengths for i in range(len(parts))]
        sums = [sum(own for own, _ in run) for _, run in runs]
        order = [
            *(own == num_counted for own in sums),
            *(_is_multiple(num_counted, own) for own in sums),
        ]
        first, run = runs[order.index(True) % len(runs)] if any(order) else (0, [])
        if run:
            found.parts = [*parts[:first], *parts[first + 1 :]]
        is_miscounted = not run or not self._have_one_proportion(run)
        shares = Shares(num_counted, self, num_counted, is_miscounted=is_miscounted)
        found.counted = shares if num_forwards else None
        return shares

    def _have_one_proportion(self, parts: Sequence[Part]) -> bool:
        """Whether the parts of each rank are the same fraction of all of these batches.

        Parts of one batch differ by at most one sample.
        """
        totals = {total for _, total in parts}
        return len(totals) == 1 or all(total % self._size == 0 for total in totals)

    def warn(self, text: str) -> None:
        """Warn of wrong weights, once."""
        has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            warnings.warn(text, stacklevel=2)


def _is_multiple(num_counted: float, own: int) -> bool:
    return num_counted % own == 0 if own else not num_counted


_COUNT_RULE = (
    "What a rank counts is the first size of the first tensor that forward is given; here that is "
    "not the batch, or there are other samples in it. Call optimizer.set_weight(number_of_samples) "
    "before each backward(), or pass weight='samples' if the loss is a mean over what is counted, "
    "or weight='rank' if this model is trained with other data than the loader's. (Batches of "
    "different sizes that are accumulated in one step have no common weight: leave out no_sync(), "
    "or give the loader drop_last=True.)"
)


def miscount(num_samples: float) -> str:
    """What is wrong where `Shares.is_miscounted`, and the cure."""
    return (
        "the model's forward saw no multiple of the samples of its batch of scatter_loader "
        f"(here it saw {num_samples:g}). {_COUNT_RULE}"
    )


def disproportion(num_all: float, shares: Shares) -> str:
    """What is wrong where `Shares.is_proportional` is False, and the cure."""
    if shares.loaders:
        parts = " and ".join(f"{own} of {total}" for own, total in shares.loaders)
        return (
            f"this step has batches of several loaders of scatter_loader, of which this rank's "
            f"parts are {parts}: not in proportion on all ranks, and one weight cannot be right "
            "for a loss of each. Use batch sizes that are multiples of the number of ranks, with "
            "drop_last=True; or, if the loss is one mean over the samples of all of them, call "
            "optimizer.set_weight(number_of_samples) before each backward()."
        )
    own, total = shares.part
    return (
        f"the model's forward saw {shares.num_counted:g} samples here and {num_all:g} on all "
        f"ranks, and this rank's part of the batch of scatter_loader is {own} of {total}: not in "
        f"proportion on all ranks, so that the mean of gradients would have wrong weights. "
        f"{_COUNT_RULE}"
    )
