"""Periodic averaging, or local SGD: every block ends with the mean of the ranks' parameters.

    a <- sum_i n_i w_i / sum_i n_i  =  a - d        (d: the mean pseudo-gradient)

Sources: CNTK's ModelAveragingSGD, which also weights by samples; Stich, *Local SGD Converges Fast
and Communicates Little*, 2019; Lin et al., *Don't Use Large Mini-Batches, Use Local SGD*, 2020,
whose post-local SGD is `Warmup` with this schedule. Difference: the mean is taken over
pseudo-gradients, not parameters, so that a codec and its error feedback see small numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.exchange.schedules.local_updates.base import LocalUpdateSchedule
from torchmn.exchange.schedules.local_updates.fragments import PseudoGradient


class PeriodicAverage(LocalUpdateSchedule):
    """Ranks train alone and average their parameters after every ``block_size`` samples.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = PeriodicAverage(block_size=4096)
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=schedule)
    """

    name = "periodic_average"

    def outer_step(self, pseudo_gradients: Sequence[PseudoGradient], num_samples: float) -> None:
        for each in pseudo_gradients:
            each.anchor.sub_(each.mean)

    def partial_outer_step(self, pseudo_gradients: Sequence[PseudoGradient], part: float) -> None:
        # Linear in d, and without state.
        self.outer_step(pseudo_gradients, part * self.full_block_size)
