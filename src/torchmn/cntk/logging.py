"""CNTK's ``cntk.logging``: what receives the progress of a training."""

from torchmn.cntk.progress_printer import ProgressPrinter, log_number_of_parameters
from torchmn.cntk.progress_writer import ProgressWriter
from torchmn.cntk.tensorboard_progress_writer import TensorBoardProgressWriter
from torchmn.cntk.training_summary_callback import TrainingSummaryProgressCallback

__all__ = [
    "ProgressPrinter",
    "ProgressWriter",
    "TensorBoardProgressWriter",
    "TrainingSummaryProgressCallback",
    "log_number_of_parameters",
]
