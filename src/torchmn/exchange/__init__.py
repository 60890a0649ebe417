"""What ranks agree on, and when."""

from torchmn.exchange.base import Schedule
from torchmn.exchange.create import SCHEDULES, create_multi_node_optimizer
from torchmn.exchange.double_buffering import DoubleBuffering
from torchmn.exchange.every_step import EveryStep
from torchmn.exchange.optimizer import MultiNodeOptimizer

__all__ = [
    "SCHEDULES",
    "DoubleBuffering",
    "EveryStep",
    "MultiNodeOptimizer",
    "Schedule",
    "create_multi_node_optimizer",
]
