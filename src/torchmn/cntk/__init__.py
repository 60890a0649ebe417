"""CNTK's way of training: its names, over the parts of torchmn."""

from torchmn.cntk import device as device
from torchmn.cntk import io as io
from torchmn.cntk import learners as learners
from torchmn.cntk import logging as logging
from torchmn.cntk import losses as losses
from torchmn.cntk import metrics as metrics
from torchmn.cntk import train as train
from torchmn.cntk.communicator import Communicator, WorkerDescriptor, mpi_communicator
from torchmn.cntk.distributed_learners import (
    DistributedLearner,
    block_momentum_distributed_learner,
    data_parallel_distributed_learner,
)
from torchmn.cntk.learner import Learner, LearnerOptions
from torchmn.cntk.learners import (
    adagrad,
    adam,
    momentum_sgd,
    nesterov,
    rmsprop,
    sgd,
)
from torchmn.cntk.losses import classification_error, cross_entropy_with_softmax, squared_error
from torchmn.cntk.progress_printer import ProgressPrinter, log_number_of_parameters
from torchmn.cntk.progress_writer import ProgressWriter
from torchmn.cntk.readers import (
    FULL_DATA_SWEEP,
    INFINITELY_REPEAT,
    MinibatchData,
    MinibatchSource,
    MinibatchSourceFromData,
    StreamDef,
    StreamDefs,
    StreamInformation,
)
from torchmn.cntk.schedules import (
    IGNORE,
    Schedule,
    UnitType,
    learning_parameter_schedule,
    learning_parameter_schedule_per_sample,
    learning_rate_schedule,
    minibatch_size_schedule,
    momentum_as_time_constant_schedule,
    momentum_schedule,
    momentum_schedule_per_sample,
    training_parameter_schedule,
)
from torchmn.cntk.session_config import (
    CheckpointConfig,
    CrossValidationConfig,
    DataUnit,
    TestConfig,
)
from torchmn.cntk.tensorboard_progress_writer import TensorBoardProgressWriter
from torchmn.cntk.trainer import Trainer
from torchmn.cntk.training_session import (
    Evaluation,
    TrainingSession,
    training_session,
)
from torchmn.cntk.training_summary_callback import TrainingSummaryProgressCallback

__all__ = [
    "FULL_DATA_SWEEP",
    "IGNORE",
    "INFINITELY_REPEAT",
    "CheckpointConfig",
    "Communicator",
    "CrossValidationConfig",
    "DataUnit",
    "DistributedLearner",
    "Evaluation",
    "Learner",
    "LearnerOptions",
    "MinibatchData",
    "MinibatchSource",
    "MinibatchSourceFromData",
    "ProgressPrinter",
    "ProgressWriter",
    "Schedule",
    "StreamDef",
    "StreamDefs",
    "StreamInformation",
    "TensorBoardProgressWriter",
    "TestConfig",
    "Trainer",
    "TrainingSession",
    "TrainingSummaryProgressCallback",
    "UnitType",
    "WorkerDescriptor",
    "adagrad",
    "adam",
    "block_momentum_distributed_learner",
    "classification_error",
    "cross_entropy_with_softmax",
    "data_parallel_distributed_learner",
    "learning_parameter_schedule",
    "learning_parameter_schedule_per_sample",
    "learning_rate_schedule",
    "log_number_of_parameters",
    "minibatch_size_schedule",
    "momentum_as_time_constant_schedule",
    "momentum_schedule",
    "momentum_schedule_per_sample",
    "momentum_sgd",
    "mpi_communicator",
    "nesterov",
    "rmsprop",
    "sgd",
    "squared_error",
    "training_parameter_schedule",
    "training_session",
]
