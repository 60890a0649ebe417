"""Differentiable communication over gloo threads, gloo processes and MPI; and what breaks it."""

from __future__ import annotations

import pytest

from tests.contracts.broken import functions as broken
from tests.contracts.suites import function_contracts as contracts
from tests.contracts.suites.communicator_contracts import ContractError
from tests.mpi_pool import MpiPool
from torchmn.testing import run_ranks

SIZES = (1, 2, 3, 4)


pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")


@pytest.mark.parametrize("world_size", SIZES)
def test_contracts_over_gloo(world_size: int) -> None:
    run_ranks(contracts.check_all, world_size)


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize("world_size", SIZES)
def test_contracts_over_mpi(mpi_pool: MpiPool, world_size: int) -> None:
    mpi_pool.run(contracts.check_all, world_size)


CAUGHT_BY = {
    broken.averages_the_gradients_of_a_broadcast: contracts.check_collectives,
    broken.promotes_16_bits: contracts.check_dtypes,
    broken.asks_only_the_own_rank: contracts.check_who_requires_a_gradient,
    broken.answers_in_one_direction: contracts.check_graphs,
    broken.takes_the_sum_for_the_mean: contracts.check_random_programs,
    broken.halves_gradients: contracts.check_chains,
    broken.loses_the_tuple: contracts.check_tuples,
    broken.cuts_the_second_derivative: contracts.check_double_backward,
    broken.runs_once: contracts.check_retained_graphs,
    broken.forgets_what_it_received: contracts.check_checkpointed,
    broken.casts_under_autocast: contracts.check_autocast,
    broken.keeps_graphs: contracts.check_dropped_graphs,
}


@pytest.mark.parametrize("make", CAUGHT_BY, ids=lambda make: make.__name__)
def test_is_caught(make) -> None:
    wrong = make()
    with pytest.raises(ContractError):
        run_ranks(lambda comm: CAUGHT_BY[make](comm, wrong), 3, timeout_s=5)


def test_every_contract_has_one_that_breaks_it() -> None:
    assert set(CAUGHT_BY.values()) == set(contracts.CONTRACTS)
