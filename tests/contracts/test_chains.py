"""Chains of links over threads, gloo processes and MPI, and implementations that break them."""

import pytest

from tests.contracts.broken import chains as broken
from tests.contracts.suites.chain_contracts import (
    GRAPHS,
    check_chains,
    check_changed_shapes,
    check_graph,
)
from tests.contracts.suites.communicator_contracts import ContractError
from tests.mpi_pool import MpiPool
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.errors import CommunicationError
from torchmn.nn import chain_list, pipeline
from torchmn.testing import run_ranks

SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("size", SIZES)
def test_graph(graph: str, size: int) -> None:
    run_ranks(lambda comm: check_graph(comm, graph), size)


@pytest.mark.parametrize("size", SIZES)
def test_changed_shapes(size: int) -> None:
    run_ranks(check_changed_shapes, size)


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize("size", SIZES)
def test_over_mpi(mpi_pool: MpiPool, size: int) -> None:
    mpi_pool.run(check_chains, size, name="flat", topology=Topology.blocks([size]))


REPLACED = {
    broken.AddsMeans: (pipeline, "_Step", "line"),
    broken.EqualParts: (pipeline, "_Step", "line"),
    broken.OneGradient: (pipeline, "_Step", "branching_1"),
    broken.Unordered: (chain_list, "ChainGraph", "branching_4"),
    broken.LastFirst: (chain_list, "ChainGraph", "doubled"),
    broken.NoDelegates: (chain_list, "ForwardPass", "beside"),
}


@pytest.mark.parametrize("kind", REPLACED, ids=lambda kind: kind.__name__)
def test_broken_ones_are_caught(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, graph = REPLACED[kind]
    run_ranks(lambda comm: check_graph(comm, graph), 3)
    monkeypatch.setattr(module, name, kind)

    def check(comm: Communicator) -> str:
        try:
            check_graph(comm, graph)
        except ContractError as error:
            return str(error)
        except CommunicationError:  # another rank has found it
            return ""
        return ""

    assert any(run_ranks(check, 3))
