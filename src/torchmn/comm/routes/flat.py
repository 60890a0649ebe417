"""All gradients in one buffer, one all-reduce."""

from __future__ import annotations

from torchmn.comm.allreduce import AllReduceAlgorithm, ReduceBlock
from torchmn.comm.base import Communicator


class FlatCommunicator(Communicator):
    """Blocking, one collective for everything, after backward (ChainerMN's `flat`)."""

    name = "flat"
    granularity = "everything"

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        algorithm.sum_(self.world, block)


class NaiveCommunicator(Communicator):
    """Blocking, one collective per parameter, after backward (ChainerMN's `naive`)."""

    name = "naive"
    granularity = "parameter"

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        algorithm.sum_(self.world, block)
