"""Periodic averaging, or local SGD: every block ends with the mean of the ranks' parameters.

    a <- sum_i n_i w_i / sum_i n_i  =  a - d        (d: the mean movement, weighted by samples)

Sources: CNTK's ModelAveragingSGD (ancestors 2.4), which weights by samples as well; Stich, *Local
SGD Converges Fast and Communicates Little*, 2019; Lin et al., *Don't Use Large Mini-Batches, Use
Local SGD*, 2020, whose post-local SGD is ``distributed_after``. Difference: the mean is formed of
movements, not of parameters, so that a codec and its error feedback see small numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.schedules.local_updates.base import BlockSchedule
from torchmn.schedules.local_updates.fragments import Movement


class PeriodicAverage(BlockSchedule):
    """Ranks train alone and average their parameters after every ``block_size`` samples."""

    name = "periodic_average"

    def _move_(self, movements: Sequence[Movement], num_samples: float) -> None:
        for movement in movements:
            movement.anchor.sub_(movement.mean)

    def _move_part_(self, movements: Sequence[Movement], part: float) -> None:
        self._move_(movements, part * self._block_size)  # a mean is a mean, of however many samples
