"""One all-reduce per parameter: the reference that every other route is tested against."""

from __future__ import annotations

from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.communicators.wire import Wire


class NaiveCommunicator(Communicator):
    """Blocking, one collective per parameter, after backward (ChainerMN's `naive`)."""

    name = "naive"
    granularity = "parameter"

    def _sum_(self, buffer: Tensor, wire: Wire, num_exact: int) -> None:
        wire.sum_(self.world, buffer, num_exact)
