"""Iterators over ranks, over gloo threads and MPI processes, for 1 to 4 ranks."""

import pytest

from tests.contracts.broken import iterators as broken
from tests.contracts.conftest import Run
from tests.contracts.suites import iterator_contracts as contracts
from tests.contracts.suites.communicator_contracts import ContractError
from tests.contracts.suites.iterator_contracts import check_all
from torchmn.testing import run_ranks


def test_contracts_over_gloo(over_gloo: Run) -> None:
    over_gloo(check_all)


@pytest.mark.mpi
@pytest.mark.processes
def test_contracts_over_mpi(over_mpi: Run) -> None:
    over_mpi(check_all)


CAUGHT_BY = {
    broken.ForgetsDtypes: contracts.check_batches,
    broken.KeepsTheFirstState: contracts.check_states,
    broken.EndsAfterOnePass: contracts.check_loaders,
    broken.TakesErrorsForTheEnd: contracts.check_errors,
    broken.SeedsEachRank: contracts.check_synchronized,
}


@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_is_caught(wrong: type, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong.apply(monkeypatch)
    with pytest.raises(ContractError):
        run_ranks(CAUGHT_BY[wrong], 3, timeout_s=5)


def test_every_contract_has_one_that_breaks_it() -> None:
    assert set(CAUGHT_BY.values()) == set(contracts.CONTRACTS)
