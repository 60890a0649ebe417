"""Names are where CNTK's scripts import them from."""

import subprocess
import sys
from importlib import import_module

import pytest

from tests.limits import limit

IMPORTS = {
    "torchmn.cntk": (
        "Trainer UnitType classification_error cross_entropy_with_softmax learning_rate_schedule "
        "momentum_sgd momentum_as_time_constant_schedule sgd adam "
        "CTFDeserializer CBFDeserializer HTKFeatureDeserializer HTKMLFDeserializer "
        "ImageDeserializer Base64ImageDeserializer UserDeserializer MinibatchSource "
        "UserMinibatchSource StreamDef StreamDefs StreamInformation INFINITELY_REPEAT"
    ),
    "torchmn.cntk.io": (
        "Base64ImageDeserializer CTFDeserializer FULL_DATA_SWEEP INFINITELY_REPEAT "
        "ImageDeserializer MinibatchSource MinibatchSourceFromData StreamDef StreamDefs "
        "UserDeserializer UserMinibatchSource"
    ),
    "torchmn.cntk.io.transforms": "color crop mean scale",
    "torchmn.cntk.learners": (
        "UnitType adagrad adam learning_parameter_schedule learning_rate_schedule "
        "momentum_as_time_constant_schedule momentum_schedule momentum_sgd nesterov rmsprop sgd"
    ),
    "torchmn.cntk.logging": (
        "ProgressPrinter TensorBoardProgressWriter TrainingSummaryProgressCallback "
        "log_number_of_parameters"
    ),
    "torchmn.cntk.losses": "cross_entropy_with_softmax squared_error",
    "torchmn.cntk.metrics": "classification_error",
    "torchmn.cntk.device": "all_devices cpu gpu",
    "torchmn.cntk.train": (
        "CheckpointConfig CrossValidationConfig DataUnit TestConfig Trainer minibatch_size_schedule"
    ),
    "torchmn.cntk.train.distributed": (
        "Communicator block_momentum_distributed_learner data_parallel_distributed_learner "
        "mpi_communicator"
    ),
    "torchmn.cntk.train.trainer": "Trainer",
    "torchmn.cntk.train.training_session": (
        "CheckpointConfig CrossValidationConfig DataUnit TestConfig TrainingSession "
        "minibatch_size_schedule training_session"
    ),
}


@pytest.mark.parametrize("module", IMPORTS)
def test_names(module: str) -> None:
    found = import_module(module)
    assert [name for name in IMPORTS[module].split() if not hasattr(found, name)] == []


def test_modules_are_attributes_after_one_import() -> None:
    """In a process of its own, where nothing else has imported them."""
    script = (
        "import torchmn.cntk as C\n"
        "C.io.StreamDef, C.io.transforms.crop, C.train.distributed.Communicator.rank\n"
        "C.train.training_session, C.training_session, C.learners.sgd, C.logging.ProgressPrinter\n"
        "C.losses.squared_error, C.metrics.classification_error, C.device.cpu()\n"
        "assert callable(C.train.training_session) and callable(C.training_session)\n"
        "from torchmn.cntk.train.training_session import *\n"
        "assert callable(training_session)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=limit(100))
