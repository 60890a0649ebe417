"""What is special about the hierarchical route."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import torchmn
from tests.limits import limit
from torchmn.cluster import Topology
from torchmn.comm.transports.base import TimeLimit
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.comm.transports.tcp import TcpTransport
from torchmn.testing import run_threads

LARGE = 70_001


@pytest.mark.parametrize("ranks_per_node", [[2, 1], [1, 2, 1], [1, 1]])
def test_large_sums_between_nodes_of_different_sizes(ranks_per_node) -> None:
    """A leader alone on its node must not announce what the other leaders cannot."""
    size = sum(ranks_per_node)
    store = HashStore()

    def rank_main(rank):
        inner = TorchDistributedTransport(store, rank, size, timeout_s=limit(10))
        comm = torchmn.create_communicator(
            "hierarchical",
            transport=TcpTransport.connect(inner, TimeLimit(10)),
            topology=Topology.blocks(ranks_per_node),
            timeout_s=limit(5),
        )
        try:
            buffers = [torch.full((LARGE,), float(rank + 1 + index)) for index in range(3)]
            for work in [comm.route.start_sum_(buffer) for buffer in buffers]:
                work.wait()
            return [float(buffer[-1]) for buffer in buffers]
        finally:
            comm.finalize()

    total = size * (size + 1) / 2
    for sums in run_threads(rank_main, size):
        assert sums == [total, total + size, total + 2 * size]
