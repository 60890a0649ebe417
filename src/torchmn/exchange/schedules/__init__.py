"""Schedules: when ranks exchange gradients or parameters."""

from torchmn.base.names import ScheduleName
from torchmn.exchange.schedules.base import Schedule, Traits
from torchmn.exchange.schedules.double_buffering import DoubleBuffering
from torchmn.exchange.schedules.every_step import EveryStep
from torchmn.exchange.schedules.local_updates.base import LocalUpdateSchedule
from torchmn.exchange.schedules.local_updates.block_momentum import BlockMomentum
from torchmn.exchange.schedules.local_updates.diloco import DiLoCo
from torchmn.exchange.schedules.local_updates.periodic_average import PeriodicAverage
from torchmn.exchange.schedules.parameter_server.schedule import ParameterServer
from torchmn.exchange.schedules.warmup import Warmup

__all__ = [
    "BlockMomentum",
    "DiLoCo",
    "DoubleBuffering",
    "EveryStep",
    "LocalUpdateSchedule",
    "ParameterServer",
    "PeriodicAverage",
    "Schedule",
    "ScheduleName",
    "Traits",
    "Warmup",
]
