"""Routes ``hierarchical`` and ``non_cuda_aware``: within nodes, then between leaders."""

from __future__ import annotations

from torchmn.comm.allreduce import AllReduceAlgorithm, ReduceBlock, ReduceScatterAllGather
from torchmn.comm.codecs.base import IsValid
from torchmn.comm.group import Group
from torchmn.comm.routes.base import Route


class BetweenNodes(Route):
    """Base class of routes that sum within nodes first; a codec encodes only between nodes."""

    plain_sum = ReduceScatterAllGather()
    _node: Group

    def _connect(self) -> None:
        nodes = self.topology.nodes
        self._node = self.groups.with_shared_memory(self.groups.own_part("node", nodes))

    @property
    def codec_scope(self) -> str:
        num_nodes = len(self.topology.nodes)
        return f"the {num_nodes} nodes" if num_nodes > 1 else ""

    def all_valid(self, is_valid: IsValid) -> IsValid:
        """Whether decoded values are valid on all ranks of the node.

        These have decoded different bytes, or none. Ranks with the same place on other nodes have
        decoded the same bytes.
        """
        return self._node.all_true(is_valid)


class HierarchicalRoute(BetweenNodes):
    """For nodes with one network adapter each (ChainerMN's `hierarchical`).

    Reduces to intra_rank 0 of each node, all-reduces between these leaders in stripes (all-to-all,
    sum at the owner, all-gather), then broadcasts in the node. Nodes may have different numbers of
    ranks. A codec encodes only messages between leaders.
    """

    name = "hierarchical"
    _leaders: Group | None

    def _connect(self) -> None:
        super()._connect()
        leaders = [ranks[0] for ranks in self.topology.nodes]
        self._leaders = self.groups.part("leaders", leaders)

    @property
    def inter_node_group(self) -> Group | None:
        return self._leaders

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        if self._node.size > 1:
            self._node.reduce_(block.buffer, 0)
        # Only the leader's buffer is defined now: it alone takes part in what crosses the network.
        if self._leaders is not None:
            self._sum_over_leaders_(self._leaders, block, algorithm)
        if self._node.size > 1:
            self._node.broadcast_(block.buffer, 0)

    def _prefetch_send(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        # Announced sums use connections of their own: all leaders announce them, or none. A leader
        # of several ranks cannot, because its block is summed within the node first.
        if self._leaders is not None and self._leaders.size == self.size:
            algorithm.prefetch_send(self._leaders, block)

    def _sum_over_leaders_(
        self, leaders: Group, block: ReduceBlock, algorithm: AllReduceAlgorithm
    ) -> None:
        algorithm.sum_(leaders, block)


class NonCudaAwareRoute(HierarchicalRoute):
    """For GPUs if the network library cannot read their memory (ChainerMN's `non_cuda_aware`).

    Reduces to intra_rank 0 on the GPUs, copies to pinned host memory, all-reduces between leaders
    on the host, copies back, and broadcasts on the GPUs. CPU tensors are not copied.
    """

    name = "non_cuda_aware"

    def only_queues(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> bool:
        """See `Route.only_queues`. False: the sum waits for the GPU."""
        return False

    def _sum_over_leaders_(
        self, leaders: Group, block: ReduceBlock, algorithm: AllReduceAlgorithm
    ) -> None:
        buffer = block.buffer
        if not buffer.is_cuda:
            super()._sum_over_leaders_(leaders, block, algorithm)
            return
        streams = self._engine.streams
        host = streams.pinned(buffer.numel(), buffer.dtype)
        host.copy_(buffer, non_blocking=True)
        leaders.await_stream(buffer.device)
        super()._sum_over_leaders_(leaders, block.with_buffer(host), algorithm)
        buffer.copy_(host, non_blocking=True)
        event = streams.record()
        if event is not None:
            streams.give_back(host, event)
