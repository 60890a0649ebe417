"""Every rank of a node carries its share between nodes."""

from __future__ import annotations

from torchmn.comm.allreduce import (
    AllReduceAlgorithm,
    ReduceBlock,
    ReduceScatterAllGather,
)
from torchmn.comm.base import Communicator, between_nodes
from torchmn.comm.group import Group
from torchmn.errors import UnsupportedError


class TwoDimensionalCommunicator(Communicator):
    """For nodes with several network adapters (ChainerMN's `two_dimensional`).

    Reduce-scatter in the node, all-reduce of each stripe with the ranks of the same intra_rank on
    the other nodes, all-gather in the node. All nodes need the same number of ranks, which
    ChainerMN did not check. A codec encodes only what passes between nodes.
    """

    name = "two_dimensional"
    plain_sum = ReduceScatterAllGather()
    shards_parameters = True
    _node: Group
    _column: Group

    def check_placement(self) -> None:
        if not self.topology.is_balanced:
            raise UnsupportedError(
                f"two_dimensional needs the same number of ranks on every node, but there are "
                f"{self.topology}. Use 'hierarchical', or start the same number "
                "of ranks on every node."
            )

    def _connect(self) -> None:
        nodes = self.topology.nodes
        self._node = self._groups.with_shared_memory(self._groups.own_part("node", nodes))
        self._column = self._groups.own_part("column", list(zip(*nodes, strict=True)))

    @property
    def inter_node_group(self) -> Group | None:
        return self._column

    @property
    def codec_scope(self) -> str:
        return between_nodes(self.topology)

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        mine = block
        if self._node.size > 1:
            part = self._node.reduce_scatter_stripes_(block.buffer)
            start = int(part.storage_offset()) - int(block.buffer.storage_offset())
            mine = block.between(start, start + part.numel())
        algorithm.sum_(self._column, mine)
        if self._node.size > 1:
            self._node.all_gather_stripes_(block.buffer)

    def _prefetch_send(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        if self._node.size == 1:
            algorithm.prefetch_send(self._column, block)

    def all_valid(self, is_valid: bool) -> bool:
        """Ranks of one column have decoded the same bytes; other columns have decoded others."""
        return self._node.all_true(is_valid)
