"""Distributed evaluation over the shards of all ranks.

What extends the evaluators of pytorch-pfn-extras loads on first use, and needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from torchmn.base.errors import require
from torchmn.comm.heartbeat import HeartbeatGather
from torchmn.train.evaluation.buffers import sync_buffers_
from torchmn.train.evaluation.evaluation_batches import batch_to, call_with_batch, evaluation_mode
from torchmn.train.evaluation.sums import Ratio, WeightedSums, means_of, merge_sums

if TYPE_CHECKING:
    from torchmn.train.evaluation.create import (
        GenericMultiNodeEvaluator,
        create_multi_node_evaluator,
    )

__all__ = [
    "GenericMultiNodeEvaluator",
    "HeartbeatGather",
    "Ratio",
    "WeightedSums",
    "batch_to",
    "call_with_batch",
    "create_multi_node_evaluator",
    "evaluation_mode",
    "means_of",
    "merge_sums",
    "sync_buffers_",
]


def __getattr__(name: str) -> object:
    if name not in ("GenericMultiNodeEvaluator", "create_multi_node_evaluator"):
        raise AttributeError(f"module 'torchmn.train.evaluation' has no attribute {name!r}")
    require("pytorch_pfn_extras", name, "torchmn[trainer]")
    return getattr(import_module("torchmn.train.evaluation.create"), name)
