"""The calls of communicators over gloo, TCP and MPI, and implementations that break them."""

import contextlib

import pytest
from torch._C._distributed_c10d import HashStore

from tests.contracts.broken import calls as broken
from tests.contracts.suites import call_contracts
from tests.contracts.suites.call_contracts import check_calls
from tests.contracts.suites.communicator_contracts import ContractError
from tests.limits import limit
from tests.mpi_pool import MpiPool
from torchmn.cluster import Topology
from torchmn.comm import create, create_communicator
from torchmn.comm.transports.base import TimeLimit
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.comm.transports.tcp import TcpTransport
from torchmn.testing import run_ranks, run_threads

SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("size", SIZES)
def test_over_gloo(size: int) -> None:
    run_ranks(check_calls, size)


@pytest.mark.parametrize("name", ["single_node", "naive"])
def test_of_other_routes(name: str) -> None:
    run_ranks(check_calls, 3, name=name)


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize("size", SIZES)
def test_over_mpi(mpi_pool: MpiPool, size: int) -> None:
    mpi_pool.run(check_calls, size, name="flat", topology=Topology.blocks([size]))


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
            check_calls(comm)
            comm.finalize()

    run_threads(rank_main, size)


CAUGHT_BY = {
    broken.ComparesNothing: call_contracts.check_mismatch,
    broken.ComparesNamesOnly: call_contracts.check_mismatch,
    broken.RaisesOnOneRankOnly: call_contracts.check_rejection,
    broken.TakesTheInputLater: call_contracts.check_handles,
    broken.ForgetsToScale: call_contracts.check_scaling,
    broken.IgnoresTags: call_contracts.check_messages,
    broken.SortsTheRanks: call_contracts.check_subgroup,
}


@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_is_caught(wrong: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "Communicator", wrong)
    with pytest.raises(ContractError):
        run_ranks(CAUGHT_BY[wrong], 3, name="flat", timeout_s=3)


def test_every_contract_has_one_that_breaks_it() -> None:
    assert set(CAUGHT_BY.values()) == set(call_contracts.CALL_CONTRACTS)
