"""How the samples of a global batch are divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence


class BatchShares:
    """Decides how many samples of a batch each rank gets. Local, and the same on all ranks.

    In this class the numbers differ by at most one: the first ranks get the remainder.

    >>> BatchShares(3).sizes(8, at=0)
    [3, 3, 2]
    """

    def __init__(self, num_ranks: int) -> None:
        self._equal = [1] * num_ranks

    def sizes(self, batch_size: int, at: int) -> list[int]:
        """The samples of each rank in a batch that begins after ``at`` samples of training."""
        return in_proportion(batch_size, self._equal)

    def before_next(self, num_received: int) -> None:
        """Note that the script requests a batch, or ends its pass, after so many batches.

        Raises UsageError: the script does not train in the way that these shares require.
        """

    def state_at(self, at: int) -> list[list[int]]:
        """What decides on the batches after ``at`` samples; empty if there is nothing to save."""
        return []

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        """Continue from a `state_at` of any number of ranks."""


def in_proportion(total: int, weights: Sequence[int]) -> list[int]:
    """Divide ``total`` in proportion to positive weights, as evenly as whole numbers can be.

    The rest goes to the largest remainders, to the first of equal ones. Exact: in integers.

    >>> in_proportion(8, [1, 1, 1]), in_proportion(8, [3, 1])
    ([3, 3, 2], [6, 2])
    """
    whole = sum(weights)
    sizes = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: -(total * weights[rank] % whole))
    for rank in by_remainder[: total - sum(sizes)]:
        sizes[rank] += 1
    return sizes
