"""The number of an exchange: a rank that made one more or less exchanges other gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.base.errors import CommunicationError
from torchmn.exchange.agreements.base import Agreement, PassContext

_MODULUS = 4096  # so that float32 can hold the sum of the counts of many ranks


class NumExchanges(Agreement):
    """How many exchanges came before this one, since the buckets were laid out."""

    agrees_if_equal = True
    num = 0

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        return (float(self.num % _MODULUS),)

    def check(self, context: PassContext) -> None:
        """See `Agreement.check`."""
        (count,), (total,), size = self.own, self.sums, self.comm.size
        if total != count * size:
            raise CommunicationError(
                f"{self.comm.rank_label}: the ranks are at different exchanges of gradients: this "
                f"one at number {count:g}, the mean over ranks is {total / size:g}. All ranks "
                "must run the same number of backward() and step() calls, or end its loop inside "
                "optimizer.join()."
            )
