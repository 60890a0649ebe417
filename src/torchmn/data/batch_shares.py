"""How the samples of a global batch are divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BatchShares(Protocol):
    """Decides how many samples of a batch each rank gets. Local, and the same on all ranks."""

    def sizes(self, batch_size: int, at: int) -> Sequence[int]:
        """The samples of each rank, of a batch that begins after ``at`` samples of the training."""

    def begin_pass(self, *, has_trained: bool) -> None:
        """A pass over the data begins; ``has_trained``: the one before gave batches to train."""

    def state_at(self, at: int) -> list[list[int]]:
        """What decides on the batches after ``at`` samples; empty if there is nothing to save."""

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        """Continue from `state_at`, of any number of ranks."""


class EqualShares:
    """Shares differ by at most one sample; the first ranks have one more if it is uneven.

    >>> EqualShares(3).sizes(8, at=0)
    [3, 3, 2]
    """

    def __init__(self, num_ranks: int) -> None:
        self._weights = [1] * num_ranks

    def sizes(self, batch_size: int, at: int) -> list[int]:
        """See `BatchShares.sizes`."""
        return in_proportion(batch_size, self._weights)

    def begin_pass(self, *, has_trained: bool) -> None:
        """See `BatchShares.begin_pass`."""

    def state_at(self, at: int) -> list[list[int]]:
        """See `BatchShares.state_at`."""
        return []

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        """See `BatchShares.load_state`."""


def in_proportion(total: int, weights: Sequence[int]) -> list[int]:
    """Divide ``total`` in proportion to positive weights, as evenly as whole numbers can be.

    What is left over goes to the largest remainders, the first of equal ones. Exact: in integers.

    >>> in_proportion(8, [1, 1, 1]), in_proportion(8, [3, 1])
    ([3, 3, 2], [6, 2])
    """
    whole = sum(weights)
    sizes = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: -(total * weights[rank] % whole))
    for rank in by_remainder[: total - sum(sizes)]:
        sizes[rank] += 1
    return sizes
