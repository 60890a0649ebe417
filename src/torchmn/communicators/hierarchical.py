"""Sum in the node, all-reduce between node leaders, broadcast in the node."""

from __future__ import annotations

from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.communicators.group import Group
from torchmn.communicators.wire import PlainWire, StripedWire, Wire


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
        self._node = self._with_shared_memory(self._own_subgroup("node", nodes))
        self._leaders = self._subgroup("leaders", [ranks[0] for ranks in nodes])

    def _sum_(self, buffer: Tensor, wire: Wire, num_exact: int) -> None:
        if self._node.size > 1:
            self._node.reduce_(buffer, 0)
        if self._leaders is not None:
            self._sum_between_leaders_(self._leaders, buffer, wire, num_exact)
        if self._node.size > 1:
            self._node.broadcast_(buffer, 0)

    def _sum_between_leaders_(
        self, leaders: Group, buffer: Tensor, wire: Wire, num_exact: int
    ) -> None:
        if isinstance(wire, PlainWire):
            wire = StripedWire()
        wire.sum_(leaders, buffer, num_exact)
