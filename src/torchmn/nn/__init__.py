"""Modules whose ranks communicate within forward and backward: batch normalization, chains."""

from torchmn.nn.batch_norm import (
    MultiNodeBatchNorm1d,
    MultiNodeBatchNorm2d,
    MultiNodeBatchNorm3d,
    convert_batch_norm,
    create_mnbn_model,
    revert_batch_norm,
)
from torchmn.nn.chain_list import MultiNodeChainList
from torchmn.nn.clipping import clip_grad_norm_, share_nonfinite_
from torchmn.nn.n_step_rnn import MultiNodeNStepRNN, create_multi_node_n_step_rnn
from torchmn.nn.parallel_layer import (
    ParallelConv2d,
    ParallelLinear,
    gather_state_dict,
    load_whole_state_dict,
)

__all__ = [
    "MultiNodeBatchNorm1d",
    "MultiNodeBatchNorm2d",
    "MultiNodeBatchNorm3d",
    "MultiNodeChainList",
    "MultiNodeNStepRNN",
    "ParallelConv2d",
    "ParallelLinear",
    "clip_grad_norm_",
    "convert_batch_norm",
    "create_mnbn_model",
    "create_multi_node_n_step_rnn",
    "gather_state_dict",
    "load_whole_state_dict",
    "revert_batch_norm",
    "share_nonfinite_",
]
