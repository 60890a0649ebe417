"""Distributed evaluation over the shards of all ranks."""

from torchmn.communicators.heartbeat import HeartbeatGather
from torchmn.evaluation.batches import batch_to, call_with_batch
from torchmn.evaluation.buffers import BufferRule, sync_buffers_
from torchmn.evaluation.create import create_multi_node_evaluator
from torchmn.evaluation.generic import GenericMultiNodeEvaluator
from torchmn.evaluation.modes import evaluation_mode
from torchmn.evaluation.ratio import Ratio
from torchmn.evaluation.sums import Sums, WeightedSums, means_of, merge_sums, scalars_of

__all__ = [
    "BufferRule",
    "GenericMultiNodeEvaluator",
    "HeartbeatGather",
    "Ratio",
    "Sums",
    "WeightedSums",
    "batch_to",
    "call_with_batch",
    "create_multi_node_evaluator",
    "evaluation_mode",
    "means_of",
    "merge_sums",
    "scalars_of",
    "sync_buffers_",
]
