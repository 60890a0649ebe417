"""Route ``single_node``: all ranks are on one node."""

from __future__ import annotations

from torchmn.base.errors import UnsupportedError
from torchmn.cluster.units import MiB
from torchmn.comm.allreduce import AllReduceAlgorithm, ReduceBlock
from torchmn.comm.group import Group
from torchmn.comm.routes.base import Route

_UNHIDDEN_BUCKET_BYTES = 64 * MiB  # sums do not overlap backward: fewer buckets need fewer waits


class SingleNodeRoute(Route):
    """For ranks that are all on one node (ChainerMN's `single_node`).

    Sums through shared memory ignore the codec and keep full precision: nothing is sent between
    nodes, and encoding takes time on the cores that train (VGG with float16 had 0.76 to 1.03 x the
    throughput of DistributedDataParallel in five runs on a machine shared with others).
    """

    name = "single_node"
    _node: Group

    def check_placement(self) -> None:
        if len(self.topology.nodes) != 1:
            raise UnsupportedError(
                f"single_node supports one node only, but there are {self.topology}. "
                "Use 'hierarchical', 'two_dimensional' or 'auto'."
            )

    def _connect(self) -> None:
        self._node = self.groups.with_shared_memory(self.world)
        if not self.overlaps_backward:
            self.bucket_bytes = _UNHIDDEN_BUCKET_BYTES

    @property
    def overlaps_backward(self) -> bool:
        """True on GPUs only. Sums through shared memory run on the cores that backward needs.

        VGG, 2 ranks on 2 cores: 1.00 x DistributedDataParallel on gloo if overlapped with backward,
        1.01 to 1.04 x after it.
        """
        return self.device.type == "cuda"

    @property
    def inter_node_group(self) -> Group | None:
        """See `Route.inter_node_group`. None with shared memory: there are no slow links."""
        return None if self._node.transport.is_shared_memory else self._node

    @property
    def codec_scope(self) -> str:
        return "" if self.inter_node_group is None else super().codec_scope

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        # Without shared memory, as in containers that have none, messages go through sockets.
        is_shared = self._node.transport.is_shared_memory
        (self.plain_sum if is_shared else algorithm).sum_(self._node, block)
