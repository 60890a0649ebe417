"""The multi-node optimizer: a torch optimizer whose ranks exchange gradients or parameters."""

from torchmn.exchange.optimizer.create import create_multi_node_optimizer
from torchmn.exchange.optimizer.ddp_hook import ddp_hook
from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer

__all__ = [
    "MultiNodeOptimizer",
    "create_multi_node_optimizer",
    "ddp_hook",
]
