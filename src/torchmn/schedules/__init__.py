"""Schedules: when ranks exchange gradients or parameters."""

from torchmn.schedules.base import DefersUpdates, Schedule
from torchmn.schedules.compression_warmup import CompressionWarmup
from torchmn.schedules.double_buffering import DoubleBuffering
from torchmn.schedules.every_step import EveryStep
from torchmn.schedules.local_updates.base import BlockSchedule
from torchmn.schedules.local_updates.block_momentum import BlockMomentum
from torchmn.schedules.local_updates.diloco import DiLoCo
from torchmn.schedules.local_updates.fragments import Movement
from torchmn.schedules.local_updates.periodic_average import PeriodicAverage
from torchmn.schedules.next_forward.schedule import EveryStepNextForward
from torchmn.schedules.parameter_server.schedule import ParameterServer
from torchmn.schedules.parameter_server.staleness import Staleness, WorkerStaleness

__all__ = [
    "BlockMomentum",
    "BlockSchedule",
    "CompressionWarmup",
    "DefersUpdates",
    "DiLoCo",
    "DoubleBuffering",
    "EveryStep",
    "EveryStepNextForward",
    "Movement",
    "ParameterServer",
    "PeriodicAverage",
    "Schedule",
    "Staleness",
    "WorkerStaleness",
]
