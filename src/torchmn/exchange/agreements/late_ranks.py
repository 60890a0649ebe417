"""Ranks that make an exchange in `step`, as no backward pass of theirs made it."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.exchange.agreements.base import Agreement, PassContext


class LateRanks(Agreement):
    """Whether a rank makes this exchange in `step`. One object for each set of buckets.

    The others' gradients are given to it; see `share_with_late_ranks`.
    """

    is_idle = True
    is_late = False  # whether this rank does
    has_gradients = True  # whether this rank has any gradient to exchange, if it is late

    @property
    def are_some_late(self) -> bool:
        """Whether some of the active ranks are late, and not all of them."""
        return 0 < round(self.sums[0]) < self.num_active

    def note(self, *, is_late: bool, has_gradients: bool = True) -> None:
        """What this rank does in the exchange that it is about to make."""
        self.is_late, self.has_gradients, self.is_idle = is_late, has_gradients, not is_late

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        return (float(context.is_active),)
