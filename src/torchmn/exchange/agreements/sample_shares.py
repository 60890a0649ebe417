"""The samples that ranks have counted, which must be as their parts of a loader's batches."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.base.errors import UsageError
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.sample_proportions import NOT_COMPARED, Shares, disproportion, miscount
from torchmn.exchange.weights import Contribution


class SampleShares(Agreement):
    """Compares what forward has counted with the parts of batches. One object for each exchange.

    See `torchmn.exchange.sample_proportions`. The numbers: whether what a rank has counted is no
    multiple of its part; what it has counted; and how that fits.
    """

    num_values = 3

    def __init__(self, contribution: Contribution) -> None:
        self._contribution = contribution
        self._shares: Shares | None = None

    def begin(self, context: PassContext) -> None:
        """See `Agreement.begin`."""
        own = self._contribution
        self.is_idle = own.batches is None or not own.batches.are_used  # the same on all ranks
        self._shares = own.shares if context.is_active else None

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        shares = self._shares
        if shares is None:
            return 0.0, 0.0, NOT_COMPARED
        return float(shares.is_miscounted), shares.num_counted, shares.fit

    def check(self, context: PassContext) -> None:
        """See `Agreement.check`."""
        num_miscounted, num_counted, fit = self.sums
        label, shares = self.comm.rank_label, self._shares
        if num_miscounted:
            own = context.num_samples if shares is None else shares.num_counted
            raise UsageError(
                f"{label}: on {round(num_miscounted)} of {self.comm.size} ranks {miscount(own)}"
            )
        if shares is None or shares.is_proportional(fit, num_counted):
            return
        text = f"{label}: {disproportion(num_counted, shares)}"
        if shares.compared_by.is_in_first_pass:
            raise UsageError(text)
        shares.compared_by.warn(text)
