"""CNTK's trainer with every number of ranks, and trainers that are wrong."""

import pytest

import torchmn.cntk as C
from tests.contracts.broken import trainers as broken
from tests.contracts.suites.communicator_contracts import ContractError
from tests.contracts.suites.trainer_contracts import (
    TRAINER_CONTRACTS,
    Contract,
    check_averages_are_global,
    check_blocks,
    check_ends_together,
    check_sums_over_all_samples,
)
from torchmn.comm import Communicator
from torchmn.testing import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("contract", TRAINER_CONTRACTS)
def test_contracts(contract: Contract, size: int) -> None:
    run_ranks(lambda comm: contract(comm, C.Trainer), size)


CAUGHT_BY = [
    (broken.WeighsRanksEqually, check_sums_over_all_samples),
    (broken.TakesItsOwnSamples, check_sums_over_all_samples),
    (broken.ReportsItsOwnLoss, check_averages_are_global),
    (broken.EndsWithItsOwnData, check_ends_together),
    (broken.TakesAllSamplesInBlocks, check_blocks),
]


@pytest.mark.parametrize(("wrong", "contract"), CAUGHT_BY)
def test_is_caught(wrong: type[C.Trainer], contract: Contract) -> None:
    def rank_main(comm: Communicator) -> bool:
        try:
            contract(comm, wrong)
        except ContractError:
            return True
        return False

    assert any(run_ranks(rank_main, 2))


def test_every_contract_has_one_that_breaks_it() -> None:
    assert {contract for _, contract in CAUGHT_BY} == set(TRAINER_CONTRACTS)
