"""Every schedule with every codec, on every route and number of ranks: in pairs of these."""

from itertools import cycle

import pytest

from tests.contracts.broken import codecs as broken_codecs
from tests.contracts.broken import schedules as broken
from tests.contracts.pairs import in_pairs
from tests.contracts.suites import schedule_contracts
from tests.contracts.suites.communicator_contracts import ContractError
from tests.contracts.suites.schedule_contracts import (
    OPTION_CONTRACTS,
    SCHEDULE_CONTRACTS,
    check_all,
    check_option,
)
from tests.limits import limit
from tests.mpi_pool import MpiPool
from tests.ranks import on_ranks, run_placed
from torchmn.cluster import Topology
from torchmn.comm.codecs import CODECS
from torchmn.comm.create import ROUTES
from torchmn.exchange.optimizer.create import SCHEDULES
from torchmn.exchange.schedules import EveryStep
from torchmn.testing import run_ranks

PLACEMENTS = {
    "1": ("flat", Topology.blocks([1])),
    "1+1": ("flat", Topology.blocks([1, 1])),
    "3": ("naive", Topology.blocks([3])),
    "3+1": ("hierarchical", Topology.blocks([3, 1])),
    "2+2": ("two_dimensional", Topology.blocks([2, 2])),
    "4": ("single_node", Topology.blocks([4])),
    "2+1": ("non_cuda_aware", Topology.blocks([2, 1])),
}
SYNCHRONOUS = [name for name in SCHEDULES if name != "parameter_server"]
"""The parameter server has contracts of its own: `test_servers.py`."""
CAUGHT_BY = {
    broken.SumsInsteadOfMean: schedule_contracts.check_means,
    broken.AppliesTwice: schedule_contracts.check_means,
    broken.LosesTheLast: schedule_contracts.check_means,
    broken.IsEarly: schedule_contracts.check_staleness,
    broken.IsTwoLate: schedule_contracts.check_staleness,
    broken.DriftsApart: schedule_contracts.check_replicas,
    broken.LosesPendingInState: schedule_contracts.check_resume,
    broken.ForgetsLocalPasses: schedule_contracts.check_accumulation,
    broken.CountsFinishedRanks: schedule_contracts.check_join,
    broken.KeepsNoResidual: schedule_contracts.check_sums_up,
    broken.AddsNoise: schedule_contracts.check_zeros,
    broken.HidesWhatIsNotFinite: schedule_contracts.check_nonfinite,
    broken.LooksUpOptionsLater: schedule_contracts.check_options,
    broken.RunsOnOldParameters: schedule_contracts.check_trajectory,
    broken.WeighsRanksEqually: schedule_contracts.check_block_means,
    broken.SubtractsWhatItShouldAdd: schedule_contracts.check_block_means,
    broken.AnchorsDriftApart: schedule_contracts.check_block_replicas,
    broken.KeepsLocalParameters: schedule_contracts.check_block_replicas,
    broken.LosesBlockMomentumInState: schedule_contracts.check_resume,
    broken.LosesTheBlockInState: schedule_contracts.check_resume,
    broken.ForgetsLocalPassesOfBlocks: schedule_contracts.check_block_accumulation,
    broken.LosesUpdatesOfFinishedRanks: schedule_contracts.check_block_join,
    broken.KeepsNoBlockResidual: schedule_contracts.check_block_sums_up,
    broken.MovesByNoise: schedule_contracts.check_block_zeros,
    broken.ContinuesWithNaN: schedule_contracts.check_block_nonfinite,
    broken.EndsTheWarmupLater: schedule_contracts.check_warmup,
    broken.EndsSomewhereElse: schedule_contracts.check_warmup_join,
}


@pytest.mark.parametrize(
    ("codec", "label", "schedule"),
    in_pairs(CODECS, PLACEMENTS, SYNCHRONOUS, excluded=[("power_sgd", "2+2")]),
)
def test_contracts(schedule: str, codec: str, label: str) -> None:
    run_placed(PLACEMENTS[label], lambda comm: check_all(comm, schedule, codec))


@pytest.mark.parametrize(
    ("option", "label", "codec"),
    in_pairs(OPTION_CONTRACTS, ("1", "1+1", "3", "3+1"), ("float32", "int8")),
)
def test_options(option: str, codec: str, label: str) -> None:
    run_placed(PLACEMENTS[label], lambda comm: check_option(comm, option, codec))


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize(("codec", "schedule"), list(zip(CODECS, cycle(SYNCHRONOUS), strict=False)))
def test_contracts_over_mpi(mpi_pool: MpiPool, schedule: str, codec: str) -> None:
    topology = Topology.blocks([2, 1])
    mpi_pool.run(check_all, 3, schedule, codec, name="hierarchical", topology=topology)


def test_every_route_and_schedule_is_there() -> None:
    assert {route for route, _ in PLACEMENTS.values()} == ROUTES.keys() - {"pure_nccl"}
    assert len(CODECS) >= len(SYNCHRONOUS)  # over MPI each schedule has a codec


@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_a_wrong_one_is_caught(wrong: type) -> None:
    codec = "int4" if wrong in (broken.KeepsNoResidual, broken.KeepsNoBlockResidual) else None
    with pytest.raises(ContractError):
        run_ranks(lambda comm: CAUGHT_BY[wrong](comm, wrong, codec), 3, timeout_s=limit(5))


@pytest.mark.parametrize("wrong", [broken_codecs.KeepsNoResidual, broken_codecs.WrongStripe])
def test_a_wrong_codec_is_caught(wrong: type) -> None:
    with pytest.raises(ContractError):
        run_ranks(lambda comm: schedule_contracts.check_sums_up(comm, EveryStep, wrong()), 3)


def test_every_contract_has_one_that_breaks_it() -> None:
    of_options = {c for _, contracts in OPTION_CONTRACTS.values() for c in contracts}
    of_schedules = {c for contracts in SCHEDULE_CONTRACTS.values() for c in contracts}
    assert set(CAUGHT_BY.values()) == of_schedules | of_options


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_every_schedule_declares_what_holds(schedule: str) -> None:
    assert SCHEDULES[schedule]().traits.replica_consistency in SCHEDULE_CONTRACTS


@on_ranks(3)
def test_the_broken_ones_by_blocks_begin_with_one_that_is_right(comm) -> None:
    for contract in SCHEDULE_CONTRACTS["per_block"]:
        contract(comm, broken.SmallBlocks, None)
