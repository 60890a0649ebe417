"""Block momentum (BMUF) as in CNTK: the outer step is smoothed over blocks.

With W workers, N samples in the block over all workers, the mean pseudo-gradient d, its moving
average s:

    T  = block_momentum_as_time_constant,    by default -block_size / ln(1 - 1/W)
    bm = exp(-N / T)                          (by default, for a full block, 1 - 1/W; T = 0: 0)
    s <- bm s + (1 - bm) block_learning_rate W d
    a <- a - s
    a <- a - bm s                             (nesterov)

Sources: Chen and Huo, *Scalable Training of Deep Learning Machines by Incremental Block Training
with Intra-block Parallel Optimization and Blockwise Model-Update Filtering*, 2016; CNTK's
`block_momentum_distributed_learner`.

Differences from CNTK: bm is computed from the samples of all workers (CNTK used each worker's own,
and replicas diverged on uneven data); W d is weighted by samples; a block without samples is
skipped (CNTK moved by momentum alone); the anchor is taken after a warm-up; s and a are saved.
As in CNTK, W d is a sum: the step is the average only because 1 - bm = 1/W, and another time
constant changes the gain to W (1 - bm). As in CNTK, and unlike the paper, nesterov makes the point
ahead the next anchor without undoing the previous look-ahead: in the long run a block moves by
(1 + bm) W d block_learning_rate. `DiLoCo` has the paper's form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.exchange.schedules.local_updates.base import IntraNode, LocalUpdateSchedule
from torchmn.exchange.schedules.local_updates.fragments import PseudoGradient
from torchmn.exchange.schedules.local_updates.outer_momentum import OuterState


class BlockMomentum(LocalUpdateSchedule):
    """Blocks of ``block_size`` samples with momentum from block to block.

    Args:
        block_size: see `LocalUpdateSchedule`, also for the last four arguments.
        block_momentum_as_time_constant: T in samples over all workers; 0: no momentum.
        nesterov: whether to use Nesterov momentum.
        reset_sgd_momentum_after_aggregation: set the inner optimizer's first moments
            (``momentum_buffer``, ``exp_avg``) to zero at the start of each block.
        block_learning_rate: factor of the mean pseudo-gradient that is added to the average.

    Raises UsageError: an argument is out of range.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = BlockMomentum(block_size=4096)
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=schedule)
    """

    name = "block_momentum"

    def __init__(
        self,
        block_size: float | None = None,
        block_momentum_as_time_constant: float | None = None,
        nesterov: bool = True,
        reset_sgd_momentum_after_aggregation: bool = True,
        block_learning_rate: float = 1.0,
        *,
        overlap_steps: int = 0,
        num_fragments: int = 1,
        eager: bool = False,
        intra_node: IntraNode | None = None,
    ) -> None:
        super().__init__(
            block_size,
            overlap_steps=overlap_steps,
            num_fragments=num_fragments,
            eager=eager,
            intra_node=intra_node,
        )
        constant = block_momentum_as_time_constant
        if constant is not None and not 0 <= constant < math.inf:
            raise UsageError(
                f"block_momentum_as_time_constant={constant} must be a number of samples, at "
                "least 0."
            )
        self.block_momentum_as_time_constant = constant
        self.nesterov = nesterov
        self.resets_momentum = reset_sgd_momentum_after_aggregation
        self.block_learning_rate = block_learning_rate
        self._smoothed: dict[str, Tensor] = {}

    @property
    def time_constant(self) -> float:
        """T in samples over all workers. 0 with one worker, unless given."""
        if self.block_momentum_as_time_constant is not None:
            return self.block_momentum_as_time_constant
        size = self._num_workers
        return 0.0 if size == 1 else -self.full_block_size / math.log(1 - 1 / size)

    @property
    def _num_workers(self) -> int:
        return self._comm.size if self._node is None else self._comm.inter_size

    def block_momentum(self, num_samples: float) -> float:
        """The factor bm for a block of ``num_samples`` over all workers."""
        constant = self.time_constant
        return math.exp(-num_samples / constant) if constant else 0.0

    def outer_step(self, pseudo_gradients: Sequence[PseudoGradient], num_samples: float) -> None:
        momentum = self.block_momentum(num_samples)
        # The sum over workers, not the mean: see the differences above.
        gain = (1 - momentum) * self.block_learning_rate * self._num_workers
        for each in pseudo_gradients:
            if each.name not in self._smoothed:
                zeros = each.anchor.new_zeros(()).expand_as(each.anchor).clone()
                self._smoothed[each.name] = zeros
            smoothed = self._smoothed[each.name]
            smoothed.mul_(momentum).add_(each.mean, alpha=gain)
            each.anchor.sub_(smoothed, alpha=1 + momentum if self.nesterov else 1)

    def outer_state_tensors(self, pseudo_gradients: Sequence[PseudoGradient]) -> OuterState:
        names = [each.name for each in pseudo_gradients if each.name in self._smoothed]
        return {(name, "smoothed"): self._smoothed[name] for name in names}

    def outer_state_dict(self) -> dict[str, Any]:
        return {name: smoothed.clone() for name, smoothed in self._smoothed.items()}

    def load_outer_state_dict(self, state: dict[str, Any]) -> None:
        self._smoothed = {
            name: value.to(self.anchors[name].device, copy=True) for name, value in state.items()
        }
