"""The training loop: additions to pytorch-pfn-extras for distributed training.

The names load on first use and need the extra ``trainer``; `torchmn.train.evaluation`,
`torchmn.train.frameworks` and `torchmn.train.large_batch` do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torchmn.errors import require

if TYPE_CHECKING:
    from torchmn.train.allreduce_persistent import AllreducePersistent
    from torchmn.train.batch_source import EpochLoader
    from torchmn.train.early_stopping import MultiNodeEarlyStoppingTrigger
    from torchmn.train.log_report import LogReport
    from torchmn.train.observation_aggregator import ObservationAggregator
    from torchmn.train.reports import extend_with_reports
    from torchmn.train.standard_updater import Classifier, StandardUpdater
    from torchmn.train.trainer import Trainer

__all__ = [
    "AllreducePersistent",
    "Classifier",
    "EpochLoader",
    "LogReport",
    "MultiNodeEarlyStoppingTrigger",
    "ObservationAggregator",
    "StandardUpdater",
    "Trainer",
    "extend_with_reports",
]
_HOME = {
    "AllreducePersistent": "allreduce_persistent",
    "Classifier": "standard_updater",
    "EpochLoader": "batch_source",
    "LogReport": "log_report",
    "MultiNodeEarlyStoppingTrigger": "early_stopping",
    "ObservationAggregator": "observation_aggregator",
    "StandardUpdater": "standard_updater",
    "Trainer": "trainer",
    "extend_with_reports": "reports",
}


def __getattr__(name: str) -> object:
    if name in ("evaluation", "frameworks", "large_batch"):
        return import_module(f"torchmn.train.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'torchmn.train' has no attribute {name!r}")
    require("pytorch_pfn_extras", f"torchmn.train.{name}", "torchmn[trainer]")
    return getattr(import_module(f"torchmn.train.{_HOME[name]}"), name)
