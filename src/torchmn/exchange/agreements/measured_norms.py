"""Norms of the ranks' own gradients, in exchanges that are measured."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.gradient_norms import own_terms, total_of


class MeasuredNorms(Agreement):
    """The sums of `gradient_norms`, zero unless measured. One object for each set of buckets."""

    num_values = 3

    def __init__(self) -> None:
        self._squares: Sequence[Tensor] | None = None

    def measure(self, squares: Sequence[Tensor] | None, factor: float, *, is_own: bool) -> None:
        """Contribute the squares of what is packed; see `own_terms`. None: nothing is measured."""
        self._squares, self._factor, self._is_own = squares, factor, is_own

    def write_values(self, values: Tensor, context: PassContext) -> None:
        """See `Agreement.write_values`."""
        if self._squares is not None:
            packed = total_of(self._squares, values.device)
            values[0], values[1], values[2] = own_terms(
                packed, self._factor, context.weight, context.num_samples, is_own=self._is_own
            )
