"""A contract that cannot fail proves nothing: each one catches a communicator made to break it."""

import pytest

from tests.contracts.broken import communicators as broken
from tests.contracts.suites import communicator_contracts as contracts
from tests.contracts.suites.communicator_contracts import ContractError
from torchmn.comm import create
from torchmn.comm.routes.base import Route
from torchmn.testing import run_ranks

CAUGHT_BY = {
    broken.ForgetsTheLastRank: contracts.check_sum,
    broken.DiffersByRank: contracts.check_sum,
    broken.EncodesTheExactElements: contracts.check_coded_sum,
    broken.LosesStartedSums: contracts.check_started_sums,
    broken.SendsTheOwnShape: contracts.check_tensor_collectives,
    broken.RoundsEarly: contracts.check_reductions,
    broken.LosesTypes: contracts.check_objects,
    broken.ForgetsTheKey: contracts.check_split,
    broken.ForgetsBuffers: contracts.check_bcast_data,
    broken.FixesTheSize: contracts.check_bcast_data,
    broken.SumsInsteadOfMean: contracts.check_mean_grad,
    broken.DropsTheTail: contracts.check_exactness,
}


@pytest.mark.filterwarnings("ignore:(.|\n)*the parameters of the ranks differ")  # they do
@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_is_caught(wrong: type, monkeypatch: pytest.MonkeyPatch) -> None:
    if issubclass(wrong, Route):
        monkeypatch.setitem(create.ROUTES, "flat", wrong)
    else:
        monkeypatch.setattr(create, "Communicator", wrong)
    with pytest.raises(ContractError):
        run_ranks(CAUGHT_BY[wrong], 3, name="flat", timeout_s=5)


def test_every_contract_has_one_that_breaks_it() -> None:
    assert set(CAUGHT_BY.values()) == set(contracts.CONTRACTS)
