"""Dropout that draws the same masks on all ranks, which nothing else would show."""

from __future__ import annotations

import hashlib
import os
import socket
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from torchmn.comm import Communicator


def warn_of_equal_dropout(comm: Communicator, models: Sequence[nn.Module]) -> None:
    """Warn on rank 0 if a model draws masks and all ranks would draw the same. *Collective.*

    Ranks that are threads of one process share one generator and count as one.
    """
    if comm.size == 1 or not any(_draws_masks(m) for model in models for m in model.modules()):
        return
    is_cuda = comm.device.type == "cuda"
    state = torch.cuda.get_rng_state(comm.device) if is_cuda else torch.get_rng_state()
    digest = hashlib.sha256(state.numpy().tobytes()).hexdigest()
    gathered = comm.allgather_obj((socket.gethostname(), os.getpid(), digest))
    processes = {(host, pid): theirs for host, pid, theirs in gathered}
    if comm.rank == 0 and len(processes) > len(set(processes.values())):
        warnings.warn(
            f"{comm.rank_label}: the model has dropout, and ranks will draw the same masks, as "
            "after torch.manual_seed with one seed on all of them. Call "
            "torchmn.seed_ranks(seed, comm) instead.",
            stacklevel=3,
        )


def _draws_masks(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0
