"""Every codec with every schedule and number of ranks, in pairs, under weights that change."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contracts.broken import codecs, schedules
from tests.contracts.broken import weights as broken
from tests.contracts.pairs import in_pairs
from tests.contracts.suites.communicator_contracts import ContractError
from tests.contracts.suites.schedule_contracts import variants
from tests.contracts.suites.weight_contracts import (
    WEIGHT_CONTRACTS,
    check_all,
    check_parts_of_blocks,
    check_weighted_blocks,
    check_weighted_join,
    check_weighted_means,
)
from tests.ranks import on_ranks, run_placed
from torchmn.cluster import Topology
from torchmn.comm.codecs import CODECS
from torchmn.exchange.optimizer.create import SCHEDULES
from torchmn.exchange.schedules import EveryStep
from torchmn.testing import run_ranks

pytestmark = pytest.mark.timeout(300)  # numba compiles once per machine, on one that may be busy

SYNCHRONOUS = [name for name in SCHEDULES if name != "parameter_server"]
PLACEMENTS = {
    "1": ("flat", Topology.blocks([1])),
    "2": ("flat", Topology.blocks([2])),
    "3": ("naive", Topology.blocks([3])),
    "4": ("flat", Topology.blocks([4])),
    "3+1": ("hierarchical", Topology.blocks([3, 1])),
    "2+2": ("two_dimensional", Topology.blocks([2, 2])),
}


@pytest.mark.parametrize(
    ("codec", "label", "schedule"),
    in_pairs(CODECS, PLACEMENTS, SYNCHRONOUS, excluded=[("power_sgd", "2+2")]),
)
def test_contracts(schedule: str, codec: str, label: str) -> None:
    run_placed(PLACEMENTS[label], lambda comm: check_all(comm, schedule, codec))


WEIGHTS = st.one_of(
    st.just(0.0), st.floats(1e-3, 1e4), st.integers(1, 4096).map(float), st.just(1.0)
)


@given(st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_is_lost_whatever_the_weights(data: st.DataObject) -> None:
    """What was applied is the true means, less the residuals, for any history of weights."""
    schedule = data.draw(st.sampled_from(SYNCHRONOUS))
    codec = data.draw(st.sampled_from(sorted(set(CODECS) - {"float16", "bfloat16"})))
    size = data.draw(st.integers(1, 4))
    row = st.lists(WEIGHTS, min_size=size, max_size=size)
    weights = data.draw(st.lists(row.filter(any), min_size=1, max_size=8))
    variant = data.draw(st.sampled_from([0, -1]))  # whole blocks, or streamed

    def rank_main(comm):
        comm.route.bucket_bytes = 5000
        make = variants(comm, schedule)[variant]
        is_exact = make().traits.replica_consistency == "per_step"
        contract = check_weighted_means if is_exact else check_weighted_blocks
        contract(comm, make, codec, weights)

    run_ranks(rank_main, size, name="flat")


# (what is wrong, contract, schedule, codec)
CAUGHT_BY = [
    (broken.WeighsRanksEqually, check_weighted_means, broken.WeighsRanksEqually, None),
    (schedules.CountsFinishedRanks, check_weighted_join, schedules.CountsFinishedRanks, None),
    (schedules.WeighsRanksEqually, check_weighted_blocks, schedules.WeighsRanksEqually, None),
    (broken.AppliesFullMomentum, check_parts_of_blocks, broken.AppliesFullMomentum, None),
    (broken.TakesAFullOuterStep, check_parts_of_blocks, broken.TakesAFullOuterStep, None),
    (broken.KeepsAnOldUnit, check_weighted_join, broken.KeepsAnOldUnit, "int4"),
    (codecs.NeverRollsBack, check_weighted_join, EveryStep, codecs.NeverRollsBack),
    *(
        (wrong, contract, schedule, wrong)
        for wrong in (broken.KeepsResidualsOfSums, broken.FactorsResidualsOfSums)
        for contract, schedule in (
            (check_weighted_means, EveryStep),
            (check_weighted_join, EveryStep),
            (check_weighted_blocks, schedules.SmallBlocks),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "contract", "schedule", "codec"),
    CAUGHT_BY,
    ids=[f"{wrong.__name__}-{contract.__name__}" for wrong, contract, _, _ in CAUGHT_BY],
)
@on_ranks(3)
def test_is_caught(comm, wrong: type, contract, schedule: type, codec) -> None:
    with pytest.raises(ContractError):
        contract(comm, schedule, codec() if isinstance(codec, type) else codec)


def test_every_contract_has_one_that_breaks_it() -> None:
    caught = {contract for _, contract, _, _ in CAUGHT_BY}
    assert caught == {c for cs in WEIGHT_CONTRACTS.values() for c in cs}


@on_ranks(3)
def test_the_broken_ones_begin_with_some_that_are_right(comm) -> None:
    for codec in (None, "int4"):
        for contract in WEIGHT_CONTRACTS["per_step"]:
            contract(comm, EveryStep, codec)
        for contract in WEIGHT_CONTRACTS["per_block"]:
            contract(comm, schedules.SmallBlocks, codec)
