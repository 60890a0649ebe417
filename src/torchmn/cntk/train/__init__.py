"""CNTK's ``cntk.train``: trainer, training session and distributed learners."""

from torchmn.cntk.train import distributed as distributed
from torchmn.cntk.train.trainer import Trainer as Trainer
from torchmn.cntk.train.training_session import *  # noqa: F403
from torchmn.cntk.train.training_session import __all__ as _of_session

__all__ = ["Trainer", "distributed", *_of_session]
