"""Every route, over gloo threads and MPI processes, for all world sizes and placements."""

from collections.abc import Callable

import pytest

from tests.contracts.suites.communicator_contracts import check_all, check_route
from tests.mpi_pool import MpiPool
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.comm.create import ROUTES
from torchmn.errors import UnsupportedError
from torchmn.testing import run_ranks

CPU_ROUTES = [name for name in ROUTES if name != "pure_nccl"]
PLACEMENTS = {
    "1": Topology.blocks([1]),
    "2": Topology.blocks([2]),
    "1+1": Topology.blocks([1, 1]),
    "3": Topology.blocks([3]),
    "2+1": Topology.blocks([2, 1]),
    "4": Topology.blocks([4]),
    "2+2": Topology.blocks([2, 2]),
    "3+1": Topology.blocks([3, 1]),
    "cyclic": Topology(("a", "b", "a", "b")),
    "1+1+1+1": Topology.blocks([1, 1, 1, 1]),
}


def serves(name: str, topology: Topology) -> bool:
    if name == "single_node":
        return len(topology.nodes) == 1
    return name != "two_dimensional" or topology.is_balanced


def cases() -> list:
    return [
        pytest.param(name, label, id=f"{name}-{label}")
        for name in CPU_ROUTES
        for label, topology in PLACEMENTS.items()
        if serves(name, topology)
    ]


def cases_in_turns() -> list:
    """Half of them, with every route and every placement."""
    routes, labels = CPU_ROUTES, list(PLACEMENTS)
    return [
        case
        for case in cases()
        if (routes.index(case.values[0]) + labels.index(case.values[1])) % 2 == 0
    ]


def check_of(name: str) -> Callable[[Communicator], None]:
    """Collectives do not use the route: they are tested with one of them, in all placements."""
    return check_all if name == "naive" else check_route


@pytest.mark.parametrize(("name", "label"), cases())
def test_contracts_over_gloo(name: str, label: str) -> None:
    check, topology = check_of(name), PLACEMENTS[label]
    run_ranks(check, topology.size, name=name, topology=topology)


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize(("name", "label"), cases_in_turns())
def test_contracts_over_mpi(mpi_pool: MpiPool, name: str, label: str) -> None:
    check, topology = check_of(name), PLACEMENTS[label]
    mpi_pool.run(check, topology.size, name=name, topology=topology)


def test_over_mpi_is_every_route_and_placement() -> None:
    names, labels = zip(*(case.values for case in cases_in_turns()), strict=True)
    assert ({*names}, {*labels}) == ({*CPU_ROUTES}, {*PLACEMENTS})
    of_all = [label for name, label in zip(names, labels, strict=True) if name == "naive"]
    assert {PLACEMENTS[label].size for label in of_all} == {1, 2, 3, 4}


@pytest.mark.parametrize("label", ["3+1", "2+1"])
def test_two_dimensional_rejects_unequal_nodes_on_all_ranks(label: str) -> None:
    topology = PLACEMENTS[label]
    with pytest.raises(UnsupportedError, match="same number of ranks on every node"):
        run_ranks(lambda comm: None, topology.size, name="two_dimensional", topology=topology)


def test_single_node_rejects_two_nodes() -> None:
    with pytest.raises(UnsupportedError, match="supports one node only"):
        run_ranks(lambda comm: None, 2, name="single_node", topology=PLACEMENTS["1+1"])


def test_pure_nccl_without_cuda_is_rejected_with_the_cure() -> None:
    with pytest.raises(UnsupportedError, match="needs a CUDA device.*Use 'auto'"):
        run_ranks(lambda comm: None, 2, name="pure_nccl")
