"""Route ``two_dimensional``: sums within nodes, then between equal local ranks of all nodes."""

from __future__ import annotations

from torchmn.base.errors import UnsupportedError
from torchmn.comm.allreduce import AllReduceAlgorithm, ReduceBlock
from torchmn.comm.group import Group
from torchmn.comm.routes.hierarchical import BetweenNodes


class TwoDimensionalRoute(BetweenNodes):
    """For nodes with several network adapters (ChainerMN's `two_dimensional`).

    Reduce-scatter in the node, all-reduce of each stripe with the ranks of the same intra_rank on
    the other nodes, all-gather in the node. All nodes must have the same number of ranks, which
    ChainerMN did not check. A codec encodes only messages between nodes.
    """

    name = "two_dimensional"
    shards_parameters = True
    _column: Group

    def check_placement(self) -> None:
        if not self.topology.is_balanced:
            raise UnsupportedError(
                f"two_dimensional needs the same number of ranks on every node, but there are "
                f"{self.topology}. Use 'hierarchical', or start the same number "
                "of ranks on every node."
            )

    def _connect(self) -> None:
        super()._connect()
        # The ranks of a column are those that have the same stripe after the reduce-scatter.
        columns = list(zip(*self.topology.nodes, strict=True))
        self._column = self.groups.own_part("column", columns)

    @property
    def inter_node_group(self) -> Group | None:
        return self._column

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        mine = block
        if self._node.size > 1:
            part = self._node.reduce_scatter_stripes_(block.buffer)
            # The stripe is a view into the buffer, so its offset is its place in the block.
            start = int(part.storage_offset()) - int(block.buffer.storage_offset())
            mine = block.between(start, start + part.numel())
        algorithm.sum_(self._column, mine)
        if self._node.size > 1:
            self._node.all_gather_stripes_(block.buffer)

    def _prefetch_send(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        # With several ranks per node the stripe is known only after the reduce-scatter.
        if self._node.size == 1:
            algorithm.prefetch_send(self._column, block)
