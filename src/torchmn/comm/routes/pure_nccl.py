"""Route ``pure_nccl``: NCCL computes sums over all GPUs."""

from __future__ import annotations

from torchmn.base.errors import UnsupportedError
from torchmn.cluster.environment_variables import SHARE_GPU_VARIABLE
from torchmn.cluster.units import MiB
from torchmn.comm.allreduce import AllReduceAlgorithm, ReduceBlock
from torchmn.comm.codecs import Codec
from torchmn.comm.codecs.base import IsValid
from torchmn.comm.group import Group
from torchmn.comm.routes.base import Route
from torchmn.comm.routes.hierarchical import HierarchicalRoute
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport


class PureNcclRoute(Route):
    """One NCCL all-reduce per bucket over all GPUs (ChainerMN's `pure_nccl`).

    Between hosts of several GPUs a codec is used as by `HierarchicalRoute`: NCCL sums within a
    host, where links are faster than encoding, and one GPU of each host sends encoded messages.
    """

    name = "pure_nccl"
    bucket_bytes = 25 * MiB
    """Like DistributedDataParallel. Each sum costs the host some launches, whatever its size."""
    _by_host: Route | None = None
    """The route of encoded sums; None if that is this route."""

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

    def allreduce_algorithm(self, codec: Codec | None) -> AllReduceAlgorithm:
        """See `Route.allreduce_algorithm`. *Collective* with a codec."""
        # Groups are made when they are needed: those of NCCL take memory of the GPU.
        if codec is not None and self._by_host is None and 1 < len(self.topology.nodes) < self.size:
            self._by_host = HierarchicalRoute(self.groups, self.topology, self.device, None)
        return super().allreduce_algorithm(codec)

    def all_valid(self, is_valid: IsValid) -> IsValid:
        """See `Route.all_valid`."""
        return is_valid if self._by_host is None else self._by_host.all_valid(is_valid)

    @property
    def inter_node_group(self) -> Group | None:
        return self.world if self._by_host is None else self._by_host.inter_node_group

    @property
    def codec_scope(self) -> str:
        return super().codec_scope if self._by_host is None else self._by_host.codec_scope

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        if algorithm.codec is None or self._by_host is None:
            algorithm.sum_(self.world, block)
        else:
            self._by_host._sum_(block, algorithm)
