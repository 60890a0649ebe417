"""A user's `torch.set_default_device` changes nothing of ours."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import torchmn
from tests.contracts.suites.communicator_contracts import network, sgd, step, training_data
from tests.limits import limit
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.comm.create import ROUTES
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.testing import run_threads

CPU = torch.device("cpu")


def everything(comm: Communicator) -> None:
    """What an ordinary script calls. Values on the device "meta" would be errors or nothing."""
    with torch.device(CPU):
        ones, model = torch.ones(4), network(comm.rank)
        (x,), (y,) = training_data(num_steps=1)
    assert comm.allreduce(ones).tolist() == [2.0] * 4
    assert comm.reduce_scatter([ones, ones], "mean").tolist() == [1.0] * 4
    assert comm.allgather_obj({"x": ones, 1: b"b"})[1]["x"].tolist() == [1.0] * 4
    assert comm.bcast(ones).device == CPU
    if comm.rank:
        comm.send(ones, 0)
    else:
        assert comm.recv(1).device == CPU
    part = comm.split(0, comm.rank)
    part.barrier()
    part.finalize()
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
    for _ in range(2):
        step(model, optimizer, x, y)
    optimizer.close()
    data = [(float(i), str(i)) for i in range(10)] if comm.rank == 0 else None
    shard = torchmn.scatter_dataset(data, comm)
    assert shard[0] == (5.0 * comm.rank, str(5 * comm.rank))
    numbers = list(range(10)) if comm.rank == 0 else None
    assert torchmn.scatter_dataset(numbers, comm)[1] == 5 * comm.rank + 1


@pytest.mark.parametrize("name", ["flat", "single_node", "hierarchical", "two_dimensional"])
def test_everything_stays_on_the_cpu(name: str) -> None:
    assert name in ROUTES
    store = HashStore()

    def rank_main(rank: int) -> None:
        with torch.device("meta"):  # of this thread; set_default_device does the same
            transport = TorchDistributedTransport(
                store, rank, 2, timeout_s=limit(20), is_trusted=True
            )
            nodes = [1, 1] if name == "hierarchical" else [2]
            comm = torchmn.create_communicator(
                name, transport=transport, topology=Topology.blocks(nodes), timeout_s=limit(20)
            )
            try:
                everything(comm)
            finally:
                comm.finalize()

    run_threads(rank_main, 2)
