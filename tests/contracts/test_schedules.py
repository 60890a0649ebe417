"""Every schedule with every codec, for all world sizes."""

import os

import pytest

from tests.contracts.broken import schedules as broken
from torchmn.exchange import SCHEDULES
from torchmn.launch.detect import find_mpirun
from torchmn.testing import MpiPool, run_ranks, schedule_contracts
from torchmn.testing.contracts import ContractError
from torchmn.testing.schedule_contracts import SCHEDULE_CONTRACTS, TOLERANCE, check_all
from torchmn.topology import Topology

PLACEMENTS = {
    "1": ("flat", Topology.blocks([1])),
    "2": ("flat", Topology.blocks([2])),
    "3": ("naive", Topology.blocks([3])),
    "3+1": ("hierarchical", Topology.blocks([3, 1])),
}
BOUNDED_CODECS = [codec for codec in TOLERANCE if codec is not None]
"""Those with a bound on the error of one mean; with error feedback only their sum has one."""
CAUGHT_BY = {
    broken.SumsInsteadOfMean: schedule_contracts.check_means,
    broken.AppliesTwice: schedule_contracts.check_means,
    broken.LosesTheLast: schedule_contracts.check_means,
    broken.IsEarly: schedule_contracts.check_staleness,
    broken.IsTwoLate: schedule_contracts.check_staleness,
    broken.DriftsApart: schedule_contracts.check_replicas,
    broken.LosesPendingInState: schedule_contracts.check_resume,
    broken.ForgetsLocalPasses: schedule_contracts.check_accumulation,
    broken.CountsTheAbsent: schedule_contracts.check_join,
}


@pytest.mark.parametrize(
    ("codec", "label"),
    [
        (codec, label)
        for codec in BOUNDED_CODECS
        for label in (PLACEMENTS if codec == "float32" else ("1", "3+1"))
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_contracts(schedule: str, codec: str, label: str) -> None:
    name, topology = PLACEMENTS[label]
    run_ranks(
        lambda comm: check_all(comm, schedule, codec),
        topology.size,
        name=name,
        topology=topology,
    )


@pytest.fixture(scope="module")
def pool():
    if find_mpirun(os.environ) is None:
        pytest.skip(reason="no mpirun: install it with 'make setup'")
    with MpiPool(3) as started:
        yield started


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_contracts_over_mpi(pool: MpiPool, schedule: str) -> None:
    topology = Topology.blocks([2, 1])
    pool.run(check_all, 3, schedule, "float32", name="hierarchical", topology=topology)


@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_a_wrong_one_is_caught(wrong: type) -> None:
    with pytest.raises(ContractError):
        run_ranks(lambda comm: CAUGHT_BY[wrong](comm, wrong, None), 3, timeout_s=5)


def test_every_contract_has_one_that_breaks_it() -> None:
    assert set(CAUGHT_BY.values()) == set(SCHEDULE_CONTRACTS)
