"""Block momentum (BMUF) as CNTK has it: what blocks moved is smoothed over blocks.

With W workers, N samples in the block over all workers, the mean movement d, the smoothed s:

    T  = block_momentum_as_time_constant,    by default -block_size / ln(1 - 1/W)
    bm = exp(-N / T)                          (by default, for a full block, 1 - 1/W; T = 0: 0)
    s <- bm s + (1 - bm) block_learning_rate W d
    a <- a - s
    a <- a - bm s                             (nesterov)

Sources: Chen and Huo, *Scalable Training of Deep Learning Machines by Incremental Block Training
with Intra-block Parallel Optimization and Blockwise Model-Update Filtering*, 2016; CNTK's
`block_momentum_distributed_learner` (ancestors 2.3).

Differences from CNTK: bm is computed from the samples of all workers (CNTK took each worker's own,
and replicas drifted apart on uneven data); W d is weighted by samples; a block without samples is
left out
(CNTK moved by momentum alone); the anchor is taken behind the warm start; s and a are saved.
As in CNTK, W d is a sum: the step is the average only because 1 - bm = 1/W, and a time constant of
one's own changes the gain to W (1 - bm). As in CNTK, and unlike in the paper, nesterov makes the
point ahead the next anchor without taking the last look ahead back: in the long run a block moves
by
(1 + bm) W d block_learning_rate. `DiLoCo` has the paper's form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchmn.errors import UsageError
from torchmn.schedules.local_updates.base import BlockSchedule, InsideNode
from torchmn.schedules.local_updates.fragments import Movement
from torchmn.schedules.local_updates.partial_block import Remembered


class BlockMomentum(BlockSchedule):
    """Blocks of ``block_size`` samples, whose movements are smoothed.

    Args:
        block_size: see `BlockSchedule`, as for the last four.
        block_momentum_as_time_constant: T in samples over all workers; 0: no momentum.
        nesterov: look ahead.
        reset_sgd_momentum_after_aggregation: set the inner optimizer's smoothed gradients
            (``momentum_buffer``, ``exp_avg``) to zero where a new block begins.
        block_learning_rate: scales what enters the smoothed movement.
        distributed_after: in samples over all workers.
    """

    name = "block_momentum"

    def __init__(
        self,
        block_size: float | None = None,
        block_momentum_as_time_constant: float | None = None,
        nesterov: bool = True,
        reset_sgd_momentum_after_aggregation: bool = True,
        block_learning_rate: float = 1.0,
        distributed_after: float = 0,
        *,
        overlap_steps: int = 0,
        num_fragments: int = 1,
        inside_node: InsideNode | None = None,
    ) -> None:
        super().__init__(
            block_size,
            distributed_after=distributed_after,
            overlap_steps=overlap_steps,
            num_fragments=num_fragments,
            inside_node=inside_node,
        )
        constant = block_momentum_as_time_constant
        if constant is not None and not 0 <= constant < math.inf:
            raise UsageError(
                f"block_momentum_as_time_constant={constant} must be a number of samples, at "
                "least 0."
            )
        self.block_momentum_as_time_constant = constant
        self.nesterov = nesterov
        self.resets_smoothed_gradients = reset_sgd_momentum_after_aggregation
        self.block_learning_rate = block_learning_rate
        self._smoothed: dict[str, Tensor] = {}

    @property
    def time_constant(self) -> float:
        """T in samples over all workers. 0 with one worker, unless given."""
        if self.block_momentum_as_time_constant is not None:
            return self.block_momentum_as_time_constant
        size = self._num_workers
        return 0.0 if size == 1 else -self._block_size / math.log(1 - 1 / size)

    @property
    def _num_workers(self) -> int:
        return self._comm.size if self._node is None else self._comm.inter_size

    def block_momentum(self, num_samples: float) -> float:
        """The factor bm for a block of so many samples over all workers."""
        constant = self.time_constant
        return math.exp(-num_samples / constant) if constant else 0.0

    def _move_(self, movements: Sequence[Movement], num_samples: float) -> None:
        momentum = self.block_momentum(num_samples)
        gain = (1 - momentum) * self.block_learning_rate * self._num_workers
        for movement in movements:
            if movement.name not in self._smoothed:
                self._smoothed[movement.name] = (
                    movement.anchor.new_zeros(()).expand_as(movement.anchor).clone()
                )
            smoothed = self._smoothed[movement.name]
            smoothed.mul_(momentum).add_(movement.mean, alpha=gain)
            movement.anchor.sub_(smoothed, alpha=1 + momentum if self.nesterov else 1)

    def _remembered(self, movements: Sequence[Movement]) -> Remembered:
        return {
            (movement.name, "smoothed"): self._smoothed[movement.name]
            for movement in movements
            if movement.name in self._smoothed
        }

    def _recipe_state(self) -> dict[str, Any]:
        return {name: smoothed.clone() for name, smoothed in self._smoothed.items()}

    def _load_recipe_state(self, state: dict[str, Any]) -> None:
        self._smoothed = {
            name: value.to(self.anchors[name].device, copy=True) for name, value in state.items()
        }
