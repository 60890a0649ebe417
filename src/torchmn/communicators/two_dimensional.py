"""Every rank of a node carries its share between nodes."""

from __future__ import annotations

from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.communicators.group import Group
from torchmn.communicators.wire import PlainWire, StripedWire, Wire
from torchmn.errors import UnsupportedError


class TwoDimensionalCommunicator(Communicator):
    """For nodes with several network adapters (ChainerMN's `two_dimensional`, ancestors 1.2).

    Reduce-scatter in the node, all-reduce of each stripe with the ranks of the same intra_rank on
    the other nodes, all-gather in the node. All nodes need the same number of ranks, which
    ChainerMN did not check. A codec encodes only what passes between nodes.
    """

    name = "two_dimensional"
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
        self._node = self._with_shared_memory(self._own_subgroup("node", nodes))
        self._column = self._own_subgroup("column", list(zip(*nodes, strict=True)))

    def _sum_(self, buffer: Tensor, wire: Wire, num_exact: int) -> None:
        mine = buffer
        if self._node.size > 1:
            mine = self._node.reduce_scatter_stripes_(buffer)
        if isinstance(wire, PlainWire):
            wire = StripedWire()
        # The exact elements are the last of the buffer: they lie in the last ranks' stripes.
        end = sum(p.numel() for p in self._node.transport.stripes(buffer)[: self._node.rank + 1])
        exact_here = max(0, min(mine.numel(), num_exact - (buffer.numel() - end)))
        wire.sum_(self._column, mine, exact_here)
        if self._node.size > 1:
            self._node.all_gather_stripes_(buffer)
