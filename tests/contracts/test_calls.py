"""The calls of communicators on other routes, and over TCP (test_suites.py has the others)."""

import contextlib

import pytest
from torch._C._distributed_c10d import HashStore

from tests.contracts.suites.call_contracts import check_all
from tests.limits import limit
from torchmn.cluster import Topology
from torchmn.comm import create_communicator
from torchmn.comm.transports.base import TimeLimit
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.comm.transports.tcp import TcpTransport
from torchmn.testing import run_ranks, run_threads


@pytest.mark.parametrize("name", ["single_node", "naive"])
def test_of_other_routes(name: str) -> None:
    run_ranks(check_all, 3, name=name)


@pytest.mark.parametrize("size", [2, 3])
def test_over_tcp(size: int) -> None:
    store = HashStore()

    def rank_main(rank: int) -> None:
        inner = TorchDistributedTransport(store, rank, size, timeout_s=limit(20), is_trusted=True)
        comm = create_communicator(
            "hierarchical",
            transport=TcpTransport.connect(inner, TimeLimit(20)),
            topology=Topology.blocks([1] * size),
            timeout_s=limit(20),
        )
        with contextlib.closing(comm.world.transport):
            check_all(comm)
            comm.finalize()

    run_threads(rank_main, size)
