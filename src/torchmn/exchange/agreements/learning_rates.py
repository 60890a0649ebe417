"""The agreement on learning rates, which must be the same on all ranks at an exchange."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from torchmn.base.errors import RankMismatchError
from torchmn.exchange.agreements.base import Agreement, PassContext

# Per rank, relative to the square of the sum of rates: float32 rounds sums of n to 1e-7 n.
_TOLERANCE = 1e-6


class LearningRates(Agreement):
    """The sum of the learning rates of an optimizer's groups, and its square.

    Rates that are tensors on a GPU are left out, as the host would have to wait for them.
    """

    num_values = 2
    agrees_if_equal = True

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        total = 0.0
        for group in self._inner.param_groups if context.is_active else ():
            rate = group.get("lr")
            if isinstance(rate, (int, float)) or (isinstance(rate, Tensor) and rate.is_cpu):
                total += float(rate)
        return total, total**2

    def check(self, context: PassContext) -> None:
        """See `Agreement.check`."""
        # By the Cauchy-Schwarz inequality the difference is 0 only if all rates are equal. It is
        # computed from sums alone, so that all ranks come to the same result.
        total, squares = self.sums
        if self.num_active * squares - total**2 > self.comm.size * _TOLERANCE * total**2:
            raise RankMismatchError(
                f"{self.comm.rank_label}: the learning rates of the ranks differ: {self.own[0]:g} "
                f"here, {total / max(1, self.num_active):g} in the mean over ranks (sums of the "
                "groups). The parameters would become others on each rank. Step schedulers on all "
                "ranks in the same way, and ReduceLROnPlateau by a value that all ranks share, "
                "such as comm.sum_over_ranks(loss_sum, n)."
            )
