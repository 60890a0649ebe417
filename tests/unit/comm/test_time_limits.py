"""Every call has a time limit, and the error names collective, rank and host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.contracts.suites.communicator_contracts import network, sgd, step, training_data
from tests.unit.comm.ranks import SHORT_S, one_stays_away
from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.errors import CommunicationError, TimeLimitError
from torchmn.nn import MultiNodeBatchNorm1d, ParallelLinear, functions
from torchmn.testing import run_ranks

CALLS: dict[str, Callable[[Communicator], object]] = {
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.allreduce(torch.ones(3)),
    "allgather": lambda comm: comm.allgather_obj("x"),
    "bcast": lambda comm: comm.bcast_obj("x", root=1),
    "send": lambda comm: comm.recv(1),
    "all_reduce of a sum": lambda comm: comm.route.sum_(torch.ones(3)),
}


@pytest.mark.parametrize("what", CALLS)
def test_the_error_names_collective_rank_and_host(what: str) -> None:
    def call(comm):
        with pytest.raises(TimeLimitError) as caught:
            CALLS[what](comm)
        text = str(caught.value)
        assert text.startswith("rank 0 of 2 on here (")
        assert f"within {SHORT_S:g} s" in text
        assert "raise timeout_s=" in text
        assert f"#{comm.flight_recorder.last.number} of group 'world'" in text
        assert comm.flight_recorder.last.state == "late"
        for other in CALLS.values():
            with pytest.raises(CommunicationError, match="after an exchange failed: rank"):
                other(comm)

    one_stays_away(call, topology=Topology(("here", "there")))


@pytest.mark.parametrize("name", ["naive", "flat", "single_node", "hierarchical"])
def test_a_step_of_training(name: str) -> None:
    (x,), (y,) = training_data(num_steps=1)

    def created(comm):
        comm.route.bucket_bytes = 100
        model = network(0)
        return model, create_multi_node_optimizer(sgd(model), comm, model)

    def call(comm):
        model, optimizer = created(comm)
        with pytest.raises(TimeLimitError, match=r"rank 0 of 2 on .*bucket 0, step 0"):
            step(model, optimizer, x, y)
        with pytest.raises(CommunicationError, match="did not complete"):
            step(model, optimizer, x, y)

    one_stays_away(call, before=created, name=name)


def test_creation_has_a_limit() -> None:
    with pytest.raises(
        TimeLimitError, match=f"joining a world of 2 did not complete within {SHORT_S:g} s"
    ):
        TorchDistributedTransport(HashStore(), 0, 2, timeout_s=SHORT_S)


@pytest.mark.parametrize("what", ["batch norm", "parallel layer", "functions"])
def test_without_an_exchange_of_gradients_the_first_step_ends_as_well(what: str) -> None:
    """What communicates within the model counts steps by itself."""

    def rank_main(comm: Communicator) -> list[float]:
        comm.world.first_timeout_s = 100
        layer: torch.nn.Module = torch.nn.Linear(3, 4)
        if what == "batch norm":
            layer = MultiNodeBatchNorm1d(3, comm)
        elif what == "parallel layer":
            layer = ParallelLinear(3, 4, comm)
        limits = []
        for _ in range(3):
            y = layer(torch.ones(4, 3, requires_grad=True))
            used = comm
            if what == "functions":
                y = functions.allreduce(comm, functions.allreduce(comm, y))
            else:
                used = layer._ranks.layers(layer, "").comm
            limits.append(used.world.limit_s)
            y.sum().backward()
        return limits

    for limits in run_ranks(rank_main, 2, timeout_s=7):
        assert limits == [100, 7, 7]
