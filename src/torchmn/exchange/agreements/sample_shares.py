"""The samples that ranks have counted, which must be as their parts of a loader's batches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torchmn.errors import UsageError
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.sample_proportions import NOT_COMPARED, NUM_TRIED, Shares
from torchmn.exchange.weights import Contribution, disproportion, miscount


class SampleShares(Agreement):
    """Compares what forward has counted with the parts of batches. One object for each exchange.

    See `torchmn.exchange.sample_proportions`. The numbers: whether what a rank has counted is no
    multiple of its part, in its first exchange; what it has counted; and how that fits.
    """

    num_values = 2 + NUM_TRIED

    def __init__(self, contribution: Contribution) -> None:
        self._contribution = contribution
        self._shares: Shares | None = None
        self._is_miscounted = False

    def begin(self, context: PassContext) -> None:
        """See `Agreement.begin`."""
        own = self._contribution
        self.is_idle = own.shares is None and own.is_checked  # the same on all ranks
        if self.is_idle:
            return
        is_active = context.is_active
        self._shares = own.compare(context.num_samples) if is_active else None
        self._is_miscounted = is_active and own.is_miscounted(self._shares)

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        if not context.is_active:
            return (0.0,) * self.num_values
        fits = NOT_COMPARED if self._shares is None else self._shares.fits
        return float(self._is_miscounted), context.num_samples, *fits

    def check(self, context: PassContext) -> None:
        """See `Agreement.check`."""
        num_miscounted, num_samples, *fits = self.sums
        label, own, shares = self.comm.rank_label, context.num_samples, self._shares
        if num_miscounted:
            raise UsageError(
                f"{label}: on {round(num_miscounted)} of {self.comm.size} ranks {miscount(own)}"
            )
        if shares is None:
            return
        compared_by = shares.compared_by
        if compared_by.is_proportional(fits, num_samples, shares):
            return
        text = f"{label}: {disproportion(own, num_samples, shares)}"
        if compared_by.is_in_first_pass:
            raise UsageError(text)
        if compared_by.first_warning():
            warnings.warn(text, stacklevel=2)
