"""The multi-node optimizer: a torch optimizer whose ranks exchange gradients or parameters."""

from torchmn.exchange.optimizer.cntk import (
    block_momentum_distributed_learner,
    data_parallel_distributed_learner,
)
from torchmn.exchange.optimizer.create import SCHEDULES, create_multi_node_optimizer
from torchmn.exchange.optimizer.ddp_hook import ddp_hook
from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer

__all__ = [
    "SCHEDULES",
    "MultiNodeOptimizer",
    "block_momentum_distributed_learner",
    "create_multi_node_optimizer",
    "data_parallel_distributed_learner",
    "ddp_hook",
]
