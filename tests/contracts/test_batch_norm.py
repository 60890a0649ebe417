"""Batch normalization over ranks, over gloo threads and MPI processes, for 1 to 4 ranks."""

import pytest

from tests.contracts.broken import batch_norm as broken
from tests.contracts.suites import batch_norm_contracts as contracts
from tests.contracts.suites.batch_norm_contracts import check_all
from tests.contracts.suites.communicator_contracts import ContractError
from tests.mpi_pool import MpiPool
from torchmn.cluster import Topology
from torchmn.testing import run_ranks

PLACEMENTS = {
    "1": ("flat", Topology.blocks([1])),
    "2": ("single_node", Topology.blocks([2])),
    "1+1": ("naive", Topology.blocks([1, 1])),
    "3": ("flat", Topology.blocks([3])),
    "2+1": ("hierarchical", Topology.blocks([2, 1])),
    "4": ("flat", Topology.blocks([4])),
    "2+2": ("two_dimensional", Topology.blocks([2, 2])),
}


@pytest.mark.parametrize("label", PLACEMENTS)
def test_contracts_over_gloo(label: str) -> None:
    name, topology = PLACEMENTS[label]
    run_ranks(check_all, topology.size, name=name, topology=topology)


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize("label", PLACEMENTS)
def test_contracts_over_mpi(mpi_pool: MpiPool, label: str) -> None:
    name, topology = PLACEMENTS[label]
    mpi_pool.run(check_all, topology.size, name=name, topology=topology)


CAUGHT_BY = {
    broken.CountsRanksEqually: contracts.check_whole_batch,
    broken.NormalizesAlone: contracts.check_whole_batch,
    broken.IgnoresOtherRanksInBackward: contracts.check_whole_batch,
    broken.SubtractsLargeNumbers: contracts.check_large_mean,
    broken.RoundsEarly: contracts.check_sixteen_bits,
    broken.ForgetsTheGroup: contracts.check_groups,
    broken.WeighsLossesEqually: contracts.check_training,
    broken.IgnoresGivenWeights: contracts.check_given_weights,
    broken.CountsRecomputedBatchesOnce: contracts.check_checkpointing,
    broken.SendsTwice: contracts.check_one_message,
}


@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_is_caught(wrong: type, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong.apply(monkeypatch)
    with pytest.raises(ContractError):
        run_ranks(CAUGHT_BY[wrong], 3, name="flat", timeout_s=5)


def test_every_contract_has_one_that_breaks_it() -> None:
    assert set(CAUGHT_BY.values()) == set(contracts.CONTRACTS)
