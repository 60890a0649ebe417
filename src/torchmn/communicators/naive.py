"""One all-reduce per parameter: the reference that every other route is tested against."""

from __future__ import annotations

from torchmn.communicators.allreduce import Cargo, Wire
from torchmn.communicators.base import Communicator


class NaiveCommunicator(Communicator):
    """Blocking, one collective per parameter, after backward (ChainerMN's `naive`)."""

    name = "naive"
    granularity = "parameter"

    def _sum_(self, cargo: Cargo, wire: Wire) -> None:
        wire.sum_(self.world, cargo)
