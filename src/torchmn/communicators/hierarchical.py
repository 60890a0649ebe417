"""Sum in the node, all-reduce between node leaders, broadcast in the node."""

from __future__ import annotations

from torchmn.communicators.allreduce import Cargo, NativeAllReduce, ReduceScatterAllGather, Wire
from torchmn.communicators.base import Communicator, all_agree
from torchmn.communicators.group import Group


class HierarchicalCommunicator(Communicator):
    """For nodes with one network adapter each (ChainerMN's `hierarchical`, ancestors 1.2).

    Reduce to intra_rank 0 of each node, all-reduce between these leaders in stripes (all-to-all,
    sum at the owner, all-gather), broadcast in the node. Nodes may have different numbers of ranks.
    A codec encodes only what passes between leaders.
    """

    name = "hierarchical"
    _node: Group
    _leaders: Group | None

    def _connect(self) -> None:
        nodes = self.topology.nodes
        self._node = self._with_shared_memory(self._own_part_of("node", nodes))
        self._leaders = self._part_of("leaders", [ranks[0] for ranks in nodes])

    @property
    def inter_node_group(self) -> Group | None:
        """See `Communicator.inter_node_group`."""
        return self._leaders

    @property
    def encodes_between(self) -> str:
        """See `Communicator.encodes_between`."""
        num_nodes = len(self.topology.nodes)
        return f"the {num_nodes} nodes" if num_nodes > 1 else ""

    def _sum_(self, cargo: Cargo, wire: Wire) -> None:
        if self._node.size > 1:
            self._node.reduce_(cargo.buffer, 0)
        if self._leaders is not None:
            self._sum_between_leaders_(self._leaders, cargo, wire)
        if self._node.size > 1:
            self._node.broadcast_(cargo.buffer, 0)

    def _send_ahead(self, cargo: Cargo, wire: Wire) -> None:
        # All leaders or none: what is announced goes by another connection.
        if self._leaders is not None and self._leaders.size == self.size:
            wire.prefetch_send(self._leaders, cargo)

    def _agree(self, is_valid: bool) -> bool:
        """Leaders have decoded the same bytes; the others of the node have decoded nothing."""
        return all_agree(self._node, is_valid)

    def _sum_between_leaders_(self, leaders: Group, cargo: Cargo, wire: Wire) -> None:
        if isinstance(wire, NativeAllReduce):
            wire = ReduceScatterAllGather()
        wire.sum_(leaders, cargo)
