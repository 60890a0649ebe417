"""The agreement on the batches that ranks received, and on the samples that forward saw of them.

A local ``continue`` (a loss that is NaN, a caught error), a loop that is left early, or a task that
is chosen by a rank's own random numbers makes a rank exchange gradients of another batch than the
others; at the end of the epoch the ranks then wait until a time limit. A model that sees samples
that are not in the batch, or not all of them, makes means with wrong weights.

Passes that a script accumulates have one weight. If it gave them several, by `set_weight` or
`micro_batches`, that is right if they are in one proportion on all ranks.

Batches are compared if loops train with each batch before they request the next one, in the thread
that trains: no exchange so far had more than one new batch. The samples of forward are compared
whenever they are counted. Nothing is compared if ranks may have different numbers of batches: in
`join`, and under schedules that do not exchange at each step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from torchmn.base.errors import RankMismatchError, ResultWarning, UsageError
from torchmn.base.warn import warn
from torchmn.cluster.units import counted
from torchmn.comm.collectives import allgather_for
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.replica_divergence import UNKNOWN
from torchmn.exchange.step_batches import Share
from torchmn.exchange.weights import Contribution

_LARGEST_SUM = 2**24  # of squares over all ranks, which float32 holds exactly
_LARGEST = 4096


class ReceivedBatches(Agreement):
    """Compares the batches of an exchange. One object for each set of buckets.

    The values are: 1 on a rank for which no weight is right; a number for the samples that forward
    saw, or for the proportion of the weights given, and its square; a number for the batches
    received, and its square. With the squares the sums show whether all ranks have the same number.
    """

    num_values = 5

    def __init__(self, contribution: Contribution, *, compares_counts: bool) -> None:
        self._contribution, self._compares_counts = contribution, compares_counts
        self._own: tuple[int, Share | None] = (0, None)
        self._given: Sequence[float] = ()
        self._has_warned = False

    def begin(self, context: PassContext) -> None:
        """See `Agreement.begin`."""
        own = self._contribution
        self._given = [*own.given_weights] if len(own.given_weights) > 1 else ()
        self.is_idle = own.batches is None and not self._given

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        own = self._contribution
        batches, share = own.batches, own.share if self._compares_counts else None
        if not context.is_active:
            return (0.0,) * self.num_values
        self._own = 0 if batches is None else batches.number, share
        largest = min(_LARGEST, math.isqrt(_LARGEST_SUM // self.comm.size)) - 1 | 1
        seen = received = UNKNOWN
        if share is not None and share.seen is not None and not own.is_joining:
            seen = float(share.seen % largest)
        if any(self._given) and not own.is_joining:
            ratio = [round(weight / max(self._given), 9) for weight in self._given]
            seen = float(zlib.crc32(repr(ratio).encode()) % largest)
        if batches is not None and batches.is_number_compared:
            received = float(batches.number % largest)
        is_miscounted = share is not None and share.is_miscounted
        return float(is_miscounted), seen, seen**2, received, received**2

    def check(self, context: PassContext) -> bool:
        """See `Agreement.check`."""
        num_miscounted, seen, seen_squares, received, received_squares = self.sums
        if received >= 0 and self.num_active * received_squares != received**2:
            return True
        is_seen = seen < 0 or self.num_active * seen_squares == seen**2
        has_warned = self._has_warned and not self._given
        return not has_warned and (num_miscounted > 0 or not is_seen)

    def report(self, context: PassContext) -> None:
        """See `Agreement.report`. Raises RankMismatchError, UsageError."""
        label, batches = self.comm.rank_label, self._contribution.batches
        number, share = self._own
        own = "no loop over a loader", *_explained(None), 0, False
        if batches is not None:
            own = batches.places, *_explained(share), number, batches.is_in_first_pass
        if self._given:
            given = " and ".join(f"{each:g}" for each in self._given)
            own = own[0], given, _ACCUMULATED, number, True
        found = allgather_for(self.comm, "places of loops", own)
        if len({row[3] for row in found}) > 1:
            where = "; ".join(f"rank {rank} at {row[0]}" for rank, row in enumerate(found))
            raise RankMismatchError(
                f"{label}: the ranks exchange gradients of different batches: {where}. A rank has "
                "left out a batch, has left its loop, or has chosen another loader, by something "
                "of its own: its loss, an error that it caught, its clock, its random numbers. "
                "Decide by a value that all ranks share, such as comm.allreduce(loss.detach(), "
                "'mean'); in place of leaving out a batch call optimizer.set_weight(0) before its "
                "backward(); or run the loop inside optimizer.join(), where ranks may have "
                "different numbers of batches."
            )
        what = "; ".join(f"rank {rank} {row[1]}" for rank, row in enumerate(found) if row[1])
        problems = {row[2] for row in found}
        ordered = (_ACCUMULATED, _SEVERAL, _PROPORTION, _SIZES)
        problem = next(each for each in ordered if each in problems)
        text = f"{label}: {problem.format(what)}"
        if any(row[4] for row in found):
            raise UsageError(text)
        self._has_warned = True
        warn(text, ResultWarning)  # too late to be refused


def _explained(share: Share | None) -> tuple[str, str]:
    """What forward saw and which batches there were, to follow "rank 1 "; the likely problem."""
    if share is None or not share.parts:
        return "", _PROPORTION
    seen = f"saw {share.num_counted:g} samples and has"
    if share.are_of_several:
        return (
            f"{seen} {' and '.join(f'{part.own} of {part.all}' for part in share.parts)}",
            _SEVERAL,
        )
    own, total = sum(part.own for part in share.parts), sum(part.all for part in share.parts)
    are_whole = len(share.parts) > 1 and share.num_counted == own
    text = f"{seen} {own} of {total} in {counted(len(share.parts), 'batch')}"
    return text, _SIZES if are_whole else _PROPORTION


_PROPORTION = (
    "what the model's forward saw is not in proportion to the ranks' parts of the batch of "
    "scatter_loader, so that the mean of gradients would have wrong weights: {}. A rank counts the "
    "samples in the arguments of forward; here these are not the batch, or hold other samples, or "
    "some were left out on one rank. Call optimizer.set_weight(number_of_samples) before each "
    "backward(), with what the loss is a mean over, or pass weight='rank' if this model is trained "
    "with other data than the loader's."
)
_SIZES = (
    "batches of different sizes, or that are divided differently, are accumulated in one step, in "
    "which each rank has one weight: {}. Give the loader drop_last=True, or leave out no_sync(), "
    "so that each batch has an exchange and a weight of its own."
)
_SEVERAL = (
    "this step has batches of several loaders of scatter_loader, whose parts are not in proportion "
    "on all ranks, and one weight cannot be right for a loss of each: {}. Use batch sizes that are "
    "multiples of the number of ranks, with drop_last=True; or, if the loss is one mean over the "
    "samples of all of them, call optimizer.set_weight(number_of_samples) before each backward()."
)
_ACCUMULATED = (
    "passes are accumulated in one step, in which each rank has one weight, and set_weight() or "
    "micro_batches() gave them weights that are not in proportion on all ranks: {}. Accumulate "
    "outside of no_sync(), so that each pass has its own exchange and weights; or let the losses "
    "of a step be one mean: call set_weight() once, with what it is a mean over, or give "
    "GlobalBatch() the samples of a whole step, which it cuts into passes of local_batch samples."
)
