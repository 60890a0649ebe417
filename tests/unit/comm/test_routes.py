"""What is special about the hierarchical route, and about pure_nccl with a codec."""

from __future__ import annotations

import pytest
import torch

import torchmn
from tests.limits import limit
from tests.unit.comm.ranks import run_transports, tcp_over
from torchmn.cluster import Topology
from torchmn.comm.allreduce import ReduceBlock
from torchmn.comm.codecs import Layout, create_codec
from torchmn.comm.routes.pure_nccl import PureNcclRoute
from torchmn.testing import run_ranks

LARGE = 70_001


@pytest.mark.parametrize("ranks_per_node", [[2, 1], [1, 2, 1], [1, 1]])
def test_large_sums_between_nodes_of_different_sizes(ranks_per_node) -> None:
    """A leader alone on its node must not announce what the other leaders cannot."""
    size, topology = sum(ranks_per_node), Topology.blocks(ranks_per_node)

    def rank_main(transport):
        options = {"transport": transport, "topology": topology, "timeout_s": limit(5)}
        comm = torchmn.create_communicator("hierarchical", **options)
        buffers = [torch.full((LARGE,), comm.rank + 1.0 + index) for index in range(3)]
        for work in [comm.route.start_sum_(buffer) for buffer in buffers]:
            work.wait()
        comm.finalize()
        return [float(buffer[-1]) for buffer in buffers]

    total = size * (size + 1) / 2
    for sums in run_transports(rank_main, size, over=tcp_over):
        assert sums == [total, total + size, total + 2 * size]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "single_node", "flat"])
def test_the_first_bucket_follows_the_number_of_ranks(name, device, num_ranks) -> None:
    """128 KiB for each rank, if the route sends buckets during a backward pass on CPUs."""
    hosts = [num_ranks] if name == "single_node" else [1] * num_ranks

    def rank_main(comm):
        comm.route.device = torch.device(device)
        return comm.route.first_bucket_bytes, comm.route.bucket_bytes

    found = run_ranks(rank_main, num_ranks, name=name, topology=Topology.blocks(hosts))
    is_small = device == "cpu" and name in ("hierarchical", "two_dimensional")
    for first, usual in found:
        assert first == (num_ranks << 17 if is_small else usual)


@pytest.mark.parametrize("ranks_per_node", [[2, 2], [1, 1], [3]])
def test_pure_nccl_encodes_between_hosts_only(ranks_per_node, monkeypatch) -> None:
    """On CPUs, over gloo: which ranks encode, and that all have the same sum."""
    monkeypatch.setattr(PureNcclRoute, "check_placement", lambda route: None)
    size = sum(ranks_per_node)

    def rank_main(comm):
        exact = torch.full((LARGE,), comm.rank + 1.0)
        comm.route.sum_(exact)
        num_groups = len(comm.groups)
        algorithm = comm.route.allreduce_algorithm(create_codec("int8"))
        has_hosts = ranks_per_node == [2, 2]
        assert (len(comm.groups) > num_groups) == has_hosts
        encoded = torch.linspace(-1, 1, LARGE) * (comm.rank + 1)
        layout = Layout.of([("w", 0, (LARGE,))], torch.float32)
        comm.route.sum_(ReduceBlock(encoded, layout), algorithm)
        group = comm.route.inter_node_group
        is_encoding = bool(algorithm.codec.state_dict()["residuals"])
        assert is_encoding == (group is not None)
        assert comm.route.codec_scope == ("the 2 nodes" if has_hosts else f"all {size} ranks")
        return float(exact[0]), encoded, is_encoding

    topology = Topology.blocks(ranks_per_node)
    results = run_ranks(rank_main, size, name="pure_nccl", topology=topology)
    total = size * (size + 1) / 2
    for exact, encoded, _ in results:
        assert exact == total
        assert torch.equal(encoded, results[0][1])
        assert torch.allclose(encoded, torch.linspace(-1, 1, LARGE) * total, atol=0.1)
    encoding = [is_encoding for *_, is_encoding in results]
    assert encoding == ([True, False, True, False] if ranks_per_node == [2, 2] else [True] * size)
