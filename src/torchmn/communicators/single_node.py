"""One node: one all-reduce per bucket."""

from __future__ import annotations

from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.communicators.group import Group
from torchmn.communicators.wire import Wire
from torchmn.errors import UnsupportedError


class SingleNodeCommunicator(Communicator):
    """For ranks that share a node (ChainerMN's `single_node`)."""

    name = "single_node"
    _node: Group

    def check_placement(self) -> None:
        """See `Communicator.check_placement`."""
        if self.inter_size != 1:
            raise UnsupportedError(
                f"single_node serves one node, but there are {self.topology}. "
                "Use 'hierarchical', 'two_dimensional' or 'auto'."
            )

    def _connect(self) -> None:
        self._node = self._with_shared_memory(self.world)

    def _sum_(self, buffer: Tensor, wire: Wire, num_exact: int) -> None:
        wire.sum_(self._node, buffer, num_exact)
