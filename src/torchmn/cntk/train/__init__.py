"""CNTK's ``cntk.train``: trainer, training session and distributed learners."""

from torchmn.cntk.schedules import minibatch_size_schedule
from torchmn.cntk.train import distributed
from torchmn.cntk.train.trainer import Trainer
from torchmn.cntk.train.training_session import (
    CheckpointConfig,
    CrossValidationConfig,
    DataUnit,
    TestConfig,
    TrainingSession,
    training_session,
)

__all__ = [
    "CheckpointConfig",
    "CrossValidationConfig",
    "DataUnit",
    "TestConfig",
    "Trainer",
    "TrainingSession",
    "distributed",
    "minibatch_size_schedule",
    "training_session",
]
