"""Ranks that make an exchange in `step`, as no backward pass of theirs made it."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.exchange.agreements.base import Agreement, PassContext


class LateRanks(Agreement):
    """Whether a rank makes this exchange in `step`. One object for each set of buckets.

    The others' gradients are given to it; see `share_with_late_ranks`.
    """

    num_values = 2
    is_late = False
    """Whether this rank does."""
    has_gradients = True
    """Whether this rank has any gradient to exchange."""

    @property
    def are_some_late(self) -> bool:
        """Whether some of the active ranks are late, and not all of them."""
        num_late, num_active = self.sums
        return 0 < round(num_late) < round(num_active)

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        return float(self.is_late and context.is_active), context.is_active
