"""The parameter server keeps its contracts, and each catches one that is made to break it."""

import pytest

from tests.contracts.broken import servers as broken
from tests.contracts.suites import server_contracts as contracts
from tests.contracts.suites.communicator_contracts import ContractError
from tests.limits import limit
from tests.mpi_pool import MpiPool
from torchmn.cluster import Topology
from torchmn.testing import run_ranks

SAMPLE = [(1, "all"), (2, "all"), (3, "all"), (4, "all"), (3, 1), (4, 2)]
CAUGHT_BY = {
    broken.LosesAPush: contracts.check_sums,
    broken.StepsTwice: contracts.check_alone,
    broken.IgnoresTheBound: contracts.check_bound,
    broken.AddsNoise: contracts.check_zeros,
    broken.ForgetsStateWhenItBegins: contracts.check_state,
    broken.KeepsItsOwn: contracts.check_flush,
    broken.LeavesStateAtServers: contracts.check_flush,
    broken.PushesWhatIsNotFinite: contracts.check_nonfinite,
}


@pytest.mark.parametrize(("world_size", "servers"), SAMPLE)
def test_contracts(world_size: int, servers: int | str) -> None:
    run_ranks(lambda comm: contracts.check_all(comm, servers), world_size)


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize("servers", ["all", 1])
def test_contracts_over_mpi(mpi_pool: MpiPool, servers: int | str) -> None:
    topology = Topology.blocks([2, 1])
    mpi_pool.run(contracts.check_all, 3, servers, name="hierarchical", topology=topology)


@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_a_wrong_one_is_caught(wrong: type) -> None:
    with pytest.raises(ContractError):
        run_ranks(lambda comm: CAUGHT_BY[wrong](comm, wrong), 3, timeout_s=limit(5))


def test_every_contract_has_one_that_breaks_it() -> None:
    assert set(CAUGHT_BY.values()) == set(contracts.SERVER_CONTRACTS)
