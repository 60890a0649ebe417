"""Routes ``flat`` and ``naive``: one group of all ranks."""

from __future__ import annotations

from typing import ClassVar

from torchmn.comm.allreduce import AllReduceAlgorithm, ReduceBlock
from torchmn.comm.routes.base import Granularity, Route


class FlatRoute(Route):
    """Sums all gradients in one collective, after backward (ChainerMN's `flat`)."""

    name = "flat"
    granularity: ClassVar[Granularity] = "everything"

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        algorithm.sum_(self.world, block)


class NaiveRoute(FlatRoute):
    """Sums each gradient in a collective of its own, after backward (ChainerMN's `naive`)."""

    name = "naive"
    granularity = "parameter"
