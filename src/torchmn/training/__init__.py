"""The training loop: additions to pytorch-pfn-extras for distributed training."""

from torchmn.errors import require

try:
    import pytorch_pfn_extras  # noqa: F401
except ImportError:
    require("pytorch_pfn_extras", "torchmn.training", "torchmn[trainer]")

from torchmn.training.allreduce_persistent import AllreducePersistent
from torchmn.training.batch_source import BatchSource, EpochLoader
from torchmn.training.classifier import Classifier
from torchmn.training.early_stopping import MultiNodeEarlyStoppingTrigger
from torchmn.training.log_report import LogReport
from torchmn.training.observation_aggregator import ObservationAggregator
from torchmn.training.reports import extend_with_reports
from torchmn.training.standard_updater import StandardUpdater
from torchmn.training.trainer import Trainer
from torchmn.training.updater import Updater

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
