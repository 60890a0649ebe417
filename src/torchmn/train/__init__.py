"""The training loop: additions to pytorch-pfn-extras for distributed training."""

from torchmn.errors import require

try:
    import pytorch_pfn_extras  # noqa: F401
except ImportError:
    require("pytorch_pfn_extras", "torchmn.train", "torchmn[trainer]")

from torchmn.train.allreduce_persistent import AllreducePersistent
from torchmn.train.batch_source import BatchSource, EpochLoader
from torchmn.train.classifier import Classifier
from torchmn.train.early_stopping import MultiNodeEarlyStoppingTrigger
from torchmn.train.log_report import LogReport
from torchmn.train.observation_aggregator import ObservationAggregator
from torchmn.train.reports import extend_with_reports
from torchmn.train.standard_updater import StandardUpdater
from torchmn.train.trainer import Trainer
from torchmn.train.updater import Updater

__all__ = [
    "AllreducePersistent",
    "BatchSource",
    "Classifier",
    "EpochLoader",
    "LogReport",
    "MultiNodeEarlyStoppingTrigger",
    "ObservationAggregator",
    "StandardUpdater",
    "Trainer",
    "Updater",
    "extend_with_reports",
]
