"""Everything by NCCL, which finds its own way."""

from __future__ import annotations

from torchmn.communicators.allreduce import AllReduceAlgorithm, ReduceBlock
from torchmn.communicators.base import Communicator
from torchmn.errors import UnsupportedError


class PureNcclCommunicator(Communicator):
    """One NCCL all-reduce per bucket over all GPUs (ChainerMN's `pure_nccl`)."""

    name = "pure_nccl"

    def check_placement(self) -> None:
        if self.device.type != "cuda":
            raise UnsupportedError(
                "pure_nccl needs a CUDA device on every rank, and this rank found none. "
                "Use 'auto', 'single_node' or 'hierarchical' on CPUs."
            )
        if not self.world.transport.supports_nccl:
            raise UnsupportedError(
                "pure_nccl needs transport='torch', not "
                f"{self.world.transport.name!r}: NCCL is reached through torch.distributed."
            )

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        algorithm.sum_(self.world, block)
