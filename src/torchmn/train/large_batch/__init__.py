"""Large batches that keep their accuracy: the batch, rates that follow it, LARS and LAMB."""

from torchmn.train.large_batch.batch_growth import BatchGrowth
from torchmn.train.large_batch.global_batch import GlobalBatch
from torchmn.train.large_batch.lamb import LAMB
from torchmn.train.large_batch.lars import LARS
from torchmn.train.large_batch.schedules import (
    BatchSchedule,
    Cosine,
    DecayAfterGrowth,
    GradualWarmup,
    LinearScaling,
    MultiStep,
    Polynomial,
    SquareRootScaling,
)
from torchmn.train.large_batch.trust_ratio import weight_decay_groups

__all__ = [
    "LAMB",
    "LARS",
    "BatchGrowth",
    "BatchSchedule",
    "Cosine",
    "DecayAfterGrowth",
    "GlobalBatch",
    "GradualWarmup",
    "LinearScaling",
    "MultiStep",
    "Polynomial",
    "SquareRootScaling",
    "weight_decay_groups",
]
