"""All gradients in one buffer, one all-reduce."""

from __future__ import annotations

from torchmn.communicators.allreduce import Cargo, Wire
from torchmn.communicators.base import Communicator


class FlatCommunicator(Communicator):
    """Blocking, one collective for everything, after backward (ChainerMN's `flat`)."""

    name = "flat"
    granularity = "everything"

    def _sum_(self, cargo: Cargo, wire: Wire) -> None:
        wire.sum_(self.world, cargo)
