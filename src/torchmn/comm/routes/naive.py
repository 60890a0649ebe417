"""One all-reduce per parameter: the reference that every other route is tested against."""

from __future__ import annotations

from torchmn.comm.allreduce import AllReduceAlgorithm, ReduceBlock
from torchmn.comm.base import Communicator


class NaiveCommunicator(Communicator):
    """Blocking, one collective per parameter, after backward (ChainerMN's `naive`)."""

    name = "naive"
    granularity = "parameter"

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        algorithm.sum_(self.world, block)
