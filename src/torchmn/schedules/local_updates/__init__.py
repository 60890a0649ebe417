"""Schedules by blocks: every rank trains alone for a while, then all agree."""

from torchmn.schedules.local_updates.base import BlockSchedule
from torchmn.schedules.local_updates.block_momentum import BlockMomentum
from torchmn.schedules.local_updates.diloco import DiLoCo
from torchmn.schedules.local_updates.fragments import Movement
from torchmn.schedules.local_updates.periodic_average import PeriodicAverage

__all__ = ["BlockMomentum", "BlockSchedule", "DiLoCo", "Movement", "PeriodicAverage"]
