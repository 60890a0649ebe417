"""Layers divided among ranks, over gloo threads and MPI processes, for 1 to 4 ranks."""

import pytest

from tests.contracts.broken import parallel_layers as broken
from tests.contracts.conftest import Run
from tests.contracts.suites import parallel_layer_contracts as contracts
from tests.contracts.suites.communicator_contracts import ContractError
from tests.contracts.suites.parallel_layer_contracts import check_all
from torchmn.testing import run_ranks


def test_contracts_over_gloo(over_gloo: Run) -> None:
    over_gloo(check_all)


@pytest.mark.mpi
@pytest.mark.processes
def test_contracts_over_mpi(over_mpi: Run) -> None:
    over_mpi(check_all)


CAUGHT_BY = {
    broken.ForgetsOtherRanksGradients: contracts.check_layers,
    broken.AddsLossesOfAllRanks: contracts.check_layers,
    broken.DrawsItsOwnPart: contracts.check_layers,
    broken.AddsTheBiasOfEveryRank: contracts.check_training,
    broken.ForgetsTheBias: contracts.check_states,
    broken.ForgetsGradientsOfGradients: contracts.check_recomputation,
}


@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_is_caught(wrong: type, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong.apply(monkeypatch)
    with pytest.raises((ContractError, RuntimeError)):  # torch's own, of shapes and graphs
        run_ranks(CAUGHT_BY[wrong], 3, timeout_s=5)


def test_every_contract_has_one_that_breaks_it() -> None:
    assert set(CAUGHT_BY.values()) == set(contracts.CONTRACTS)
