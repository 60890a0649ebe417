"""What a step loses to the slowest rank, from the distribution of step times.

    every step                  all ranks wait for the slowest of W in each step: E max of W draws
    double buffering            a rank may be a step late: E max of means over 2 steps
    blocks of H steps           ranks wait once per block: E max of means over H steps

The draws are deviations from the median step, measured on all recorded ranks. A mean over n steps
deviates 1 / sqrt(n) as much. Pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def expected_maximum(values: Sequence[float], num_draws: int) -> float:
    """The expected largest of some independent draws from a sample.

    With more draws than values it tends to the largest value: a sample has no rarer events.

    >>> expected_maximum([0.0, 1.0], 2)
    0.75
    """
    ordered = sorted(values)
    num = len(ordered)
    return sum(
        value * ((rank / num) ** num_draws - ((rank - 1) / num) ** num_draws)
        for rank, value in enumerate(ordered, 1)
    )


def waiting_share(deviations: Sequence[float], num_ranks: int, num_independent: float) -> float:
    """How much longer than its mean a rank's step is, because it waits for the slowest rank.

    Args:
        deviations: of single steps from the typical one, as shares of it.
        num_ranks: how many wait for each other.
        num_independent: over how many steps a rank may be late before the others wait.
    """
    if num_ranks < 2 or len(deviations) < 2:
        return 0.0
    mean = math.fsum(deviations) / len(deviations)
    excess = expected_maximum(deviations, num_ranks) - mean
    return max(0.0, excess) / math.sqrt(num_independent)
