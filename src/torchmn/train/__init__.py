"""The training loop: additions to pytorch-pfn-extras for distributed training.

The names load on first use and need the extra ``trainer``; `torchmn.train.evaluation`,
`torchmn.train.frameworks` and `torchmn.train.large_batch` do not.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from torchmn.base.errors import require

if TYPE_CHECKING:
    from torchmn.train.batch_source import EpochLoader
    from torchmn.train.observation_aggregator import (
        MultiNodeEarlyStoppingTrigger,
        ObservationAggregator,
    )
    from torchmn.train.reports import AllreducePersistent, LogReport, extend_with_reports
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
_NAMES = {
    "batch_source": ("EpochLoader",),
    "observation_aggregator": ("MultiNodeEarlyStoppingTrigger", "ObservationAggregator"),
    "reports": ("AllreducePersistent", "LogReport", "extend_with_reports"),
    "standard_updater": ("Classifier", "StandardUpdater"),
    "trainer": ("Trainer",),
}


def __getattr__(name: str) -> object:
    if name in ("evaluation", "frameworks", "large_batch"):
        return import_module(f"torchmn.train.{name}")
    for module, names in _NAMES.items():
        if name in names:
            require("pytorch_pfn_extras", f"torchmn.train.{name}", "torchmn[trainer]")
            return getattr(import_module(f"torchmn.train.{module}"), name)
    raise AttributeError(f"module 'torchmn.train' has no attribute {name!r}")
