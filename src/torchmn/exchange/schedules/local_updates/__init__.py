"""Local-update schedules: every rank trains alone for a block of samples, then all agree."""

from torchmn.exchange.schedules.local_updates.base import LocalUpdateSchedule
from torchmn.exchange.schedules.local_updates.block_momentum import BlockMomentum
from torchmn.exchange.schedules.local_updates.diloco import DiLoCo
from torchmn.exchange.schedules.local_updates.fragments import PseudoGradient
from torchmn.exchange.schedules.local_updates.growing_blocks import GrowingBlocks
from torchmn.exchange.schedules.local_updates.periodic_average import PeriodicAverage

__all__ = [
    "BlockMomentum",
    "DiLoCo",
    "GrowingBlocks",
    "LocalUpdateSchedule",
    "PeriodicAverage",
    "PseudoGradient",
]
