"""Schedules: when ranks exchange gradients or parameters."""

from torchmn.schedules.base import Schedule
from torchmn.schedules.double_buffering import DoubleBuffering
from torchmn.schedules.every_step import EveryStep
from torchmn.schedules.local_updates.base import LocalUpdateSchedule
from torchmn.schedules.local_updates.block_momentum import BlockMomentum
from torchmn.schedules.local_updates.diloco import DiLoCo
from torchmn.schedules.local_updates.fragments import PseudoGradient
from torchmn.schedules.local_updates.growing_blocks import GrowingBlocks
from torchmn.schedules.local_updates.periodic_average import PeriodicAverage
from torchmn.schedules.parameter_server.schedule import ParameterServer
from torchmn.schedules.parameter_server.staleness import Staleness, WorkerStaleness
from torchmn.schedules.phases import Phases
from torchmn.schedules.warmup import Warmup

__all__ = [
    "BlockMomentum",
    "DiLoCo",
    "DoubleBuffering",
    "EveryStep",
    "GrowingBlocks",
    "LocalUpdateSchedule",
    "ParameterServer",
    "PeriodicAverage",
    "Phases",
    "PseudoGradient",
    "Schedule",
    "Staleness",
    "Warmup",
    "WorkerStaleness",
]
