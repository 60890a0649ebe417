"""All gradients in one buffer, one all-reduce."""

from __future__ import annotations

from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.communicators.wire import Wire


class FlatCommunicator(Communicator):
    """Blocking, one collective for everything, after backward (ChainerMN's `flat`)."""

    name = "flat"
    granularity = "everything"

    def _sum_(self, buffer: Tensor, wire: Wire, num_exact: int) -> None:
        wire.sum_(self.world, buffer, num_exact)
