"""What ranks agree on, and when."""

from torchmn.exchange.base import Deferring, Schedule
from torchmn.exchange.blocks.block_momentum import BlockMomentum
from torchmn.exchange.blocks.block_schedule import BlockSchedule
from torchmn.exchange.blocks.diloco import DiLoCo
from torchmn.exchange.blocks.fragments import Movement
from torchmn.exchange.blocks.periodic_average import PeriodicAverage
from torchmn.exchange.cntk import (
    block_momentum_distributed_learner,
    data_parallel_distributed_learner,
)
from torchmn.exchange.create import SCHEDULES, create_multi_node_optimizer
from torchmn.exchange.ddp_hook import ddp_hook
from torchmn.exchange.double_buffering import DoubleBuffering
from torchmn.exchange.every_step import EveryStep
from torchmn.exchange.full_precision_first import FullPrecisionFirst
from torchmn.exchange.next_forward.every_step_next_forward import EveryStepNextForward
from torchmn.exchange.optimizer import MultiNodeOptimizer
from torchmn.exchange.server.parameter_server import ParameterServer
from torchmn.exchange.server.staleness import Staleness, WorkerStaleness

__all__ = [
    "SCHEDULES",
    "BlockMomentum",
    "BlockSchedule",
    "Deferring",
    "DiLoCo",
    "DoubleBuffering",
    "EveryStep",
    "EveryStepNextForward",
    "FullPrecisionFirst",
    "Movement",
    "MultiNodeOptimizer",
    "ParameterServer",
    "PeriodicAverage",
    "Schedule",
    "Staleness",
    "WorkerStaleness",
    "block_momentum_distributed_learner",
    "create_multi_node_optimizer",
    "data_parallel_distributed_learner",
    "ddp_hook",
]
