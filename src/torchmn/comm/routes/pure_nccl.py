"""Route ``pure_nccl``: NCCL computes sums over all GPUs."""

from __future__ import annotations

from torchmn.base.errors import UnsupportedError
from torchmn.cluster.environment_variables import SHARE_GPU_VARIABLE
from torchmn.cluster.units import MiB
from torchmn.comm.allreduce import AllReduceAlgorithm, ReduceBlock
from torchmn.comm.routes.base import Route
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport


class PureNcclRoute(Route):
    """One NCCL all-reduce per bucket over all GPUs (ChainerMN's `pure_nccl`)."""

    name = "pure_nccl"
    bucket_bytes = 25 * MiB
    """Like DistributedDataParallel. Each sum costs the host some launches, whatever its size."""

    def check_placement(self) -> None:
        if self.device.type != "cuda":
            raise UnsupportedError(
                "pure_nccl needs a CUDA device on every rank, and this rank found none. "
                "Use 'auto', 'single_node' or 'hierarchical' on CPUs."
            )
        transport = self.world.transport
        if transport.name != TorchDistributedTransport.name:
            raise UnsupportedError(
                f"pure_nccl needs transport='torch', not {transport.name!r}: NCCL is reached "
                "through torch.distributed."
            )
        if not transport.supports_nccl:
            raise UnsupportedError(
                f"pure_nccl needs a GPU for each of the {self.size} ranks, and some share one "
                f"({SHARE_GPU_VARIABLE}=1 lets them, for tests), or this build of torch has no "
                "NCCL. Use 'auto', 'single_node' or 'hierarchical', which then send through host "
                "memory."
            )

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        algorithm.sum_(self.world, block)
