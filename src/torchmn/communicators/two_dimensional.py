"""Every rank of a node carries its share between nodes."""

from __future__ import annotations

from torchmn.communicators.allreduce import Cargo, NativeAllReduce, ReduceScatterAllGather, Wire
from torchmn.communicators.base import Communicator, all_agree
from torchmn.communicators.group import Group
from torchmn.errors import UnsupportedError


class TwoDimensionalCommunicator(Communicator):
    """For nodes with several network adapters (ChainerMN's `two_dimensional`, ancestors 1.2).

    Reduce-scatter in the node, all-reduce of each stripe with the ranks of the same intra_rank on
    the other nodes, all-gather in the node. All nodes need the same number of ranks, which
    ChainerMN did not check. A codec encodes only what passes between nodes.
    """

    name = "two_dimensional"
    shards_parameters = True
    _node: Group
    _column: Group

    def check_placement(self) -> None:
        """See `Communicator.check_placement`."""
        if not self.topology.is_balanced:
            raise UnsupportedError(
                f"two_dimensional needs the same number of ranks on every node, but there are "
                f"{self.topology}. Use 'hierarchical', or start equally many ranks per node."
            )

    def _connect(self) -> None:
        nodes = self.topology.nodes
        self._node = self._with_shared_memory(self._own_part_of("node", nodes))
        self._column = self._own_part_of("column", list(zip(*nodes, strict=True)))

    @property
    def inter_node_group(self) -> Group | None:
        """See `Communicator.inter_node_group`."""
        return self._column

    @property
    def encodes_between(self) -> str:
        """See `Communicator.encodes_between`."""
        num_nodes = len(self.topology.nodes)
        return f"the {num_nodes} nodes" if num_nodes > 1 else ""

    def _sum_(self, cargo: Cargo, wire: Wire) -> None:
        mine = cargo
        if self._node.size > 1:
            part = self._node.reduce_scatter_stripes_(cargo.buffer)
            start = int(part.storage_offset()) - int(cargo.buffer.storage_offset())
            mine = cargo.between(start, start + part.numel())
        if isinstance(wire, NativeAllReduce):
            wire = ReduceScatterAllGather()
        wire.sum_(self._column, mine)
        if self._node.size > 1:
            self._node.all_gather_stripes_(cargo.buffer)

    def _send_ahead(self, cargo: Cargo, wire: Wire) -> None:
        if self._node.size == 1:
            wire.prefetch_send(self._column, cargo)

    def _agree(self, is_valid: bool) -> bool:
        """Ranks of one column have decoded the same bytes, the others of the node other ones."""
        return all_agree(self._node, is_valid)
