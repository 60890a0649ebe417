"""CNTK's ``cntk.logging``: what receives the progress of a training."""

from torchmn.cntk.progress import (
    ProgressPrinter,
    ProgressWriter,
    TensorBoardProgressWriter,
    TrainingSummaryProgressCallback,
    log_number_of_parameters,
)

__all__ = [
    "ProgressPrinter",
    "ProgressWriter",
    "TensorBoardProgressWriter",
    "TrainingSummaryProgressCallback",
    "log_number_of_parameters",
]
