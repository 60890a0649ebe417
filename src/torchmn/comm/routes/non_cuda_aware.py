"""The hierarchical route with the part between nodes on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.comm.allreduce import AllReduceAlgorithm, ReduceBlock
from torchmn.comm.group import Group
from torchmn.comm.routes.hierarchical import HierarchicalCommunicator


class NonCudaAwareCommunicator(HierarchicalCommunicator):
    """For GPUs whose network library cannot read GPU memory (ChainerMN's `non_cuda_aware`).

    Reduce to intra_rank 0 on the GPUs, copy to pinned host memory, all-reduce between leaders on
    the host, copy back, broadcast on the GPUs. CPU tensors are not copied.
    """

    name = "non_cuda_aware"
    _host: Tensor | None = None

    def _sum_over_leaders_(
        self, leaders: Group, block: ReduceBlock, algorithm: AllReduceAlgorithm
    ) -> None:
        buffer = block.buffer
        if not buffer.is_cuda:
            super()._sum_over_leaders_(leaders, block, algorithm)
            return
        if self._host is None or self._host.numel() < buffer.nbytes:
            self._host = torch.empty(
                buffer.nbytes, dtype=torch.uint8, pin_memory=True, device="cpu"
            )
        host = self._host[: buffer.nbytes].view(buffer.dtype)
        host.copy_(buffer, non_blocking=True)
        leaders.await_stream(buffer.device)
        super()._sum_over_leaders_(leaders, block.with_buffer(host), algorithm)
        buffer.copy_(host, non_blocking=True)
        leaders.await_stream(buffer.device)  # the pinned buffer is used again
