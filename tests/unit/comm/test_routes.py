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
from torchmn.testing import run_ranks, run_threads

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


def test_the_size_of_buckets_follows_the_gradients_and_the_ranks() -> None:
    """An eighth of them, but no message of less than 128 KiB, and no more than 4 MiB."""
    sizes = [1 << 16, 2_500_000, 100 << 20]
    for num_ranks, least in ((2, 1 << 18), (4, 1 << 19)):
        routes = [
            comm.route
            for comm in run_ranks(
                lambda comm: comm,
                num_ranks,
                name="two_dimensional",
                topology=Topology.blocks([1] * num_ranks),
            )
        ]
        for route in routes:
            found = [route.bucket_bytes_for(nbytes) for nbytes in sizes]
            assert found == [least, max(least, 2_500_000 // 8), 4 << 20]
            assert route.bucket_bytes_for(0) == least
