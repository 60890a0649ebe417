"""Whether the samples that ranks have counted are in the proportion of their parts of a batch.

With the mean of a rank's part as its loss, the weights of ranks must be as their parts p_i of the
batch of P samples. What is counted is c_i, the first size of the first tensor that the model's
forward is given. If that is something else, such as the nodes of graphs or a constant tensor, then
weights are wrong where parts are uneven. By Cauchy and Schwarz

    P sum_i c_i^2 / p_i  >=  (sum_i c_i)^2,   with equality where all c_i = k p_i

so that one number per rank, summed in the footer of the exchange, shows it on all ranks. Which
batch the forward pass was given is not known: it may be the last one that the loop has received or,
where a loop requests batches in advance, the one before it; with gradient accumulation, all since
the exchange before. Each of these is tried. How far in advance a loop requests its batches is seen
from the first exchange of a pass, and does not change within it; more than one is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchmn.comm.scattered_loaders import DividedBatches, PassParts

NUM_TRIED = 4
"""The last batch and all since the last exchange, requested just before and one in advance."""
_LAGS = (0, 0, 1, 1)
_TOLERANCE = 1e-5
"""Relative, of the square of the sum: float32 rounds sums."""
_UNFIT = 1e30
_UNKNOWN = -1e25


class Shares(NamedTuple):
    """What a rank knows of one exchange."""

    fits: tuple[float, ...]
    """c^2 / p, for each of the batches that are tried."""
    totals: tuple[int, ...]
    """P."""
    own: tuple[int, ...]
    """p."""
    lags: set[int]
    """Of this pass: how far in advance its batches may be requested."""
    has_ended: bool
    """Whether the loop has requested a batch after the last one."""
    compared_by: BatchShares
    loaders: tuple[tuple[int, int], ...] = ()
    """p and P of each loader, if several were read."""


class BatchShares:
    """Compares the counts of one optimizer with the parts of the batches, exchange by exchange.

    Where several loaders were read since the last exchange, and the model was called more than
    once, each loss has the weights of its own loader: the parts must be in the same proportion.
    """

    def __init__(self, batches: DividedBatches) -> None:
        self._batches = batches
        self._received: dict[int, int] = {}
        """Batches that the loop had received of each pass at the exchange before."""
        self._number = 0
        self._range = 0, 0
        self._lags = {0, 1}
        self._num_passes = 0
        self._has_warned = False

    @property
    def is_in_first_pass(self) -> bool:
        """Whether no other pass has been compared before."""
        return self._num_passes <= 1

    def of(self, num_counted: float, num_forwards: int) -> Shares | None:
        """What this rank contributes to the next comparison; None if nothing is compared. Local."""
        under_way = self._batches.under_way()
        received = {
            number: min(parts.num_received(), len(parts)) for number, parts in under_way.items()
        }
        read = [number for number in received if received[number] > self._received.get(number, 0)]
        if len(read) == 1:
            self._range = self._received.get(read[0], 0), received[read[0]]
            if read[0] != self._number:
                self._number = read[0]
                self._num_passes += 1
                self._begin_pass(under_way[read[0]], num_counted)
        self._received = received
        if len(read) > 1 and num_forwards > 1:
            parts = [under_way[each].between(received[each] - 1, received[each]) for each in read]
            return self._of_several(parts)
        if len(read) > 1 or self._number not in under_way or not self._lags:
            return None
        current = under_way[self._number]
        tried = _tried(current, *self._range, num_counted)
        return Shares(*tried, self._lags, current.has_ended(), self)

    def _begin_pass(self, parts: PassParts, num_counted: float) -> None:
        """See from the first exchange how far in advance the loop requests its batches."""
        first, last = self._range
        largest = max(parts.between(each, each + 1)[0] for each in range(first, last))
        if last - first == 1:
            self._lags = {0}
        elif last - first == 2 or num_counted > largest:  # the latter with gradient accumulation
            self._lags = {0, 1}
        else:  # batches are kept in a list, requested by a thread, or were left out
            self._lags = set()

    def _of_several(self, parts: Sequence[tuple[int, int]]) -> Shares | None:
        (own, total), *others = parts
        if all(own * other_total == other * total for other, other_total in others):
            return None
        fits, totals, owns = (_UNFIT,) * NUM_TRIED, (total,) * NUM_TRIED, (own,) * NUM_TRIED
        return Shares(fits, totals, owns, set(), False, self, tuple(parts))

    def is_proportional(self, sums: Sequence[float], num_counted: float, shares: Shares) -> bool:
        """Whether counts are as the parts of one of the batches. The same on all ranks.

        Args:
            sums: of `Shares.fits` over ranks.
            num_counted: over all ranks.
            shares: of this rank.
        """
        square = num_counted**2
        fitting = {
            lag
            for lag, fit, total in zip(_LAGS, sums, shares.totals, strict=True)
            if total and total * fit - square <= _TOLERANCE * square
        }
        if 0 in fitting and shares.has_ended:
            fitting.add(1)  # a loop has no batch to request in advance at its end
        shares.lags.intersection_update(fitting)
        return bool(shares.lags)

    def first_warning(self) -> bool:
        """Whether nothing was warned of before. Later calls return False."""
        is_first, self._has_warned = not self._has_warned, True
        return is_first


def _tried(
    parts: PassParts, before: int, now: int, num_counted: float
) -> tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...]]:
    """Fits, totals and own parts of what is tried."""
    ranges = ((now - 1, now), (before, now), (now - 2, now - 1), (max(before - 1, 0), now - 1))
    fits, totals, owns = [], [], []
    for first, last in ranges:
        own, total = parts.between(first, last) if 0 <= first < last else (0, 0)
        owns.append(own)
        totals.append(total)
        if own:
            fits.append(num_counted**2 / own)
        else:
            fits.append(_UNFIT if num_counted else 0.0)
    return tuple(fits), tuple(totals), tuple(owns)


NOT_COMPARED = (_UNKNOWN,) * NUM_TRIED
"""In place of `Shares.fits`, from a rank that does not compare: then none does."""
