"""The batches that the ranks' loops have received: a script may leave one out on one rank.

A local ``continue`` (a loss that is NaN, a caught error), a loop that is left early, or a task that
is chosen by a rank's own random numbers lets a rank exchange gradients of another batch than the
others, and ends in a time limit at the end of the epoch. A loader that divides each batch among the
ranks knows how many this rank has received since the exchange before.

Ranks are compared only where their loops train with each batch before they request the next one, in
the thread that trains: no exchange so far was of more than one new batch. So nothing is said of
batches that are kept, requested by a thread, accumulated or packed, nor where ranks may have
different numbers of batches: in `join`, and under schedules that do not exchange at each step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from torchmn.base.errors import RankMismatchError
from torchmn.comm.collectives import allgather_for
from torchmn.data.divided_batches import DividedBatches, Loop
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.replica_divergence import UNKNOWN

_LARGEST_SUM = 2**24  # of squares over all ranks, which float32 holds exactly
_LARGEST = 4096
# Exchanges of one batch each before one of several is taken for a batch that was left out.
_MIN_REGULAR = 2


class BatchWatch:
    """The batches that one optimizer's exchanges are of, on this rank. Local.

    Args:
        batches: what loaders divide among the ranks.
    """

    def __init__(self, batches: DividedBatches) -> None:
        self.is_joining = False  # whether ranks may receive different numbers of batches
        self._batches = batches
        self._thread = threading.get_ident()
        self._received: dict[int, int] = {}  # by pass, at the exchange before
        self._step = 0
        # Exchanges of one new batch so far; None if there was one of several.
        self._num_regular: int | None = 0

    def take(self, step: int) -> tuple[list[Loop], int | None]:
        """The loops with batches since the exchange before, and a number for what is compared.

        The number is None if nothing is to be compared.
        """
        before = self._received
        if not (before or self._batches.passes):
            return [], 0
        loops = [loop for loop in self._batches.loops() if loop.num_received]
        if step > self._step + 1:  # there were steps without an exchange
            self._num_regular = 0
        self._step = step
        self._received = {loop.number: loop.num_received for loop in loops}
        new = {loop: loop.num_received - before.get(loop.number, 0) for loop in loops}
        num_new, num_regular = sum(new.values()), self._num_regular
        is_here = all(loop.thread == self._thread for loop in loops)
        if num_regular is None or self.is_joining or not is_here:
            self._num_regular = None if not self.is_joining else num_regular
            return loops, None
        self._num_regular = num_regular + num_new if num_new <= 1 else None
        if num_new > 1 and num_regular < _MIN_REGULAR:
            return loops, None
        return loops, sum((2 * loop.loader + 1) * num for loop, num in new.items())


class ReceivedBatches(Agreement):
    """Which batches a rank has received since the exchange before. One object for each set."""

    num_values = 2
    agrees_if_equal = True

    def __init__(self, watch: BatchWatch) -> None:
        self._watch = watch
        self._own: list[Loop] = []

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        self._own, number = self._watch.take(context.step)
        if not context.is_active:
            return (0.0, 0.0)
        if number is None:
            return (UNKNOWN, 0.0)
        number %= min(_LARGEST, math.isqrt(_LARGEST_SUM // self.comm.size)) - 1 | 1
        return float(number), float(number**2)

    def check(self, context: PassContext) -> bool:
        """See `Agreement.check`."""
        total, squares = self.sums
        return total >= 0 and self.num_active * squares != total**2

    def report(self, context: PassContext) -> None:
        """See `Agreement.report`. Raises RankMismatchError."""
        own = ", ".join(map(str, self._own)) or "no loop over a loader"
        places = allgather_for(self.comm, "places of loops", own)
        where = "; ".join(f"rank {rank} at {place}" for rank, place in enumerate(places))
        raise RankMismatchError(
            f"{self.comm.rank_label}: the ranks exchange gradients of different batches: {where}. "
            "A rank has left out a batch, has left its loop, or has chosen another loader, by "
            "something of its own: its loss, an error that it caught, its clock, its random "
            "numbers. Decide by a value that all ranks share, such as "
            "comm.allreduce(loss.detach(), 'mean'); in place of leaving out a batch call "
            "optimizer.set_weight(0) before its backward(); or run the loop inside "
            "optimizer.join(), where ranks may have different numbers of batches."
        )
