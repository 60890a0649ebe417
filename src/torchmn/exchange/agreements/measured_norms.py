"""Norms of the ranks' own gradients, in exchanges that are measured."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.gradient_norms import own_terms, total_of


class MeasuredNorms(Agreement):
    """The sums of `gradient_norms`, zero unless measured. One object for each set of buckets."""

    num_values = 3
    is_idle = True

    def measure(self, squares: Sequence[Tensor], factor: float, *, is_own: bool) -> None:
        """Contribute the squares of what is packed to the next exchange; see `own_terms`."""
        self._squares, self._factor, self._is_own = squares, factor, is_own
        self.is_idle = False

    def write_values(self, values: Tensor, context: PassContext) -> None:
        """See `Agreement.write_values`."""
        self.is_idle = True
        packed = total_of(self._squares, values.device)
        values[0], values[1], values[2] = own_terms(
            packed, self._factor, context.weight, context.num_samples, is_own=self._is_own
        )
