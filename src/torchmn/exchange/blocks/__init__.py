"""Schedules by blocks: every rank trains alone for a while, then all agree."""

from torchmn.exchange.blocks.block_momentum import BlockMomentum
from torchmn.exchange.blocks.block_schedule import BlockSchedule
from torchmn.exchange.blocks.diloco import DiLoCo
from torchmn.exchange.blocks.fragments import Movement
from torchmn.exchange.blocks.periodic_average import PeriodicAverage

__all__ = ["BlockMomentum", "BlockSchedule", "DiLoCo", "Movement", "PeriodicAverage"]
