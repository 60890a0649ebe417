"""What a model is worth, measured over the shards of all ranks."""

from torchmn.evaluation.batches import batch_to, call_with_batch, num_samples
from torchmn.evaluation.buffers import BufferRule, unify_buffers_
from torchmn.evaluation.create import create_multi_node_evaluator
from torchmn.evaluation.generic import GenericMultiNodeEvaluator
from torchmn.evaluation.meeting import Meeting
from torchmn.evaluation.ratio import Ratio

__all__ = [
    "BufferRule",
    "GenericMultiNodeEvaluator",
    "Meeting",
    "Ratio",
    "batch_to",
    "call_with_batch",
    "create_multi_node_evaluator",
    "num_samples",
    "unify_buffers_",
]
