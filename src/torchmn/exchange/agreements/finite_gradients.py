"""How many gradients are not finite."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.finiteness import Finiteness


class FiniteGradients(Agreement):
    """How many gradients of a rank are not finite. One object for each set of buckets.

    Nothing is raised here: what is not finite is named by the ranks that have it.
    """

    def __init__(self) -> None:
        self.finiteness = Finiteness()

    @property
    def are_all_finite(self) -> bool:
        """Whether they are, on all ranks, and so is what was made of them on the way."""
        return self.finiteness.is_valid and self.sums[0] == 0

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`: on a device they are counted there."""
        own = self.finiteness
        return () if own.on_device else (float(len(own.found_here)),)

    def write_values(self, values: Tensor, context: PassContext) -> None:
        """See `Agreement.write_values`."""
        values[0] = self.finiteness.count(values.device)
