"""CNTK's ``cntk.train.training_session``."""

from torchmn.cntk.schedules import minibatch_size_schedule
from torchmn.cntk.session_config import (
    CheckpointConfig,
    CrossValidationConfig,
    DataUnit,
    TestConfig,
)
from torchmn.cntk.training_session import (
    TrainingSession,
    training_session,
)

__all__ = [
    "CheckpointConfig",
    "CrossValidationConfig",
    "DataUnit",
    "TestConfig",
    "TrainingSession",
    "minibatch_size_schedule",
    "training_session",
]
