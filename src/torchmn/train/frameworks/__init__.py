"""Frameworks with loops of their own: Lightning, Fabric, Accelerate, Transformers.

Each keeps its loop, its data loaders, its metrics and its checkpoints; gradients are exchanged by a
multi-node optimizer in place of DistributedDataParallel. None of the frameworks is imported before
it is used.
"""

from torchmn.train.frameworks.accelerate import attach
from torchmn.train.frameworks.exchange import ExchangeOptions
from torchmn.train.frameworks.lightning import fabric_strategy, lightning_strategy
from torchmn.train.frameworks.torchmetrics import torchmetrics_options

__all__ = [
    "ExchangeOptions",
    "attach",
    "fabric_strategy",
    "lightning_strategy",
    "torchmetrics_options",
]
