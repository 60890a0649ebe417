"""Suites for a communicator, over gloo threads and MPI processes, and what breaks each contract."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any

import pytest

from tests.contracts.broken import (
    batch_norm,
    calls,
    communicators,
    functions,
    iterators,
    parallel_layers,
)
from tests.contracts.suites import (
    batch_norm_contracts,
    call_contracts,
    communicator_contracts,
    function_contracts,
    iterator_contracts,
    parallel_layer_contracts,
)
from tests.contracts.suites.communicator_contracts import ContractError
from tests.limits import limit
from tests.mpi_pool import MpiPool
from tests.ranks import run_placed
from torchmn.cluster import Topology
from torchmn.comm import create
from torchmn.comm.routes.base import Route
from torchmn.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning"),
    pytest.mark.filterwarnings("ignore:(.|\n)*the parameters of the ranks differ"),  # they do
]

Contract = Callable[..., None]
Placements = Mapping[str, tuple[str, Topology]]
RANKS = {str(size): ("flat", Topology.blocks([size])) for size in (1, 2, 3, 4)}
NODES = {
    "1": ("flat", Topology.blocks([1])),
    "2": ("single_node", Topology.blocks([2])),
    "1+1": ("naive", Topology.blocks([1, 1])),
    "3": ("flat", Topology.blocks([3])),
    "2+1": ("hierarchical", Topology.blocks([2, 1])),
    "4": ("flat", Topology.blocks([4])),
    "2+2": ("two_dimensional", Topology.blocks([2, 2])),
}


@dataclass(frozen=True)
class Suite:
    """A module of contracts, and implementations that are wrong with the contract that notices."""

    module: ModuleType
    caught_by: Mapping[Any, Contract]
    placements: Placements = field(default_factory=lambda: RANKS)
    raises: tuple[type[Exception], ...] = (ContractError,)


SUITES = {
    "communicators": Suite(
        communicator_contracts,
        {
            communicators.ForgetsTheLastRank: communicator_contracts.check_sum,
            communicators.DiffersByRank: communicator_contracts.check_sum,
            communicators.EncodesTheExactElements: communicator_contracts.check_coded_sum,
            communicators.LosesStartedSums: communicator_contracts.check_started_sums,
            communicators.SendsTheOwnShape: communicator_contracts.check_tensor_collectives,
            communicators.RoundsEarly: communicator_contracts.check_reductions,
            communicators.LosesTypes: communicator_contracts.check_objects,
            communicators.ForgetsTheKey: communicator_contracts.check_split,
            communicators.ForgetsBuffers: communicator_contracts.check_bcast_data,
            communicators.FixesTheSize: communicator_contracts.check_bcast_data,
            communicators.SumsInsteadOfMean: communicator_contracts.check_mean_grad,
            communicators.DropsTheTail: communicator_contracts.check_exactness,
        },
        placements={},  # test_communicators.py has more of them
    ),
    "calls": Suite(
        call_contracts,
        {
            calls.ComparesNothing: call_contracts.check_mismatch,
            calls.ComparesNamesOnly: call_contracts.check_mismatch,
            calls.RaisesOnOneRankOnly: call_contracts.check_rejection,
            calls.TakesTheInputLater: call_contracts.check_handles,
            calls.ForgetsToScale: call_contracts.check_scaling,
            calls.IgnoresTags: call_contracts.check_messages,
            calls.SortsTheRanks: call_contracts.check_subgroup,
        },
    ),
    "functions": Suite(
        function_contracts,
        {
            functions.averages_the_gradients_of_a_broadcast: function_contracts.check_collectives,
            functions.promotes_16_bits: function_contracts.check_dtypes,
            functions.asks_only_the_own_rank: function_contracts.check_who_requires_a_gradient,
            functions.answers_in_one_direction: function_contracts.check_graphs,
            functions.takes_the_sum_for_the_mean: function_contracts.check_random_programs,
            functions.halves_gradients: function_contracts.check_chains,
            functions.loses_the_tuple: function_contracts.check_tuples,
            functions.cuts_the_second_derivative: function_contracts.check_double_backward,
            functions.runs_once: function_contracts.check_retained_graphs,
            functions.forgets_what_it_received: function_contracts.check_checkpointed,
            functions.casts_under_autocast: function_contracts.check_autocast,
            functions.keeps_graphs: function_contracts.check_dropped_graphs,
        },
    ),
    "iterators": Suite(
        iterator_contracts,
        {
            iterators.forgets_dtypes: iterator_contracts.check_batches,
            iterators.keeps_the_first_state: iterator_contracts.check_states,
            iterators.ends_after_one_pass: iterator_contracts.check_loaders,
            iterators.takes_errors_for_the_end: iterator_contracts.check_errors,
            iterators.seeds_each_rank: iterator_contracts.check_synchronized,
        },
    ),
    "batch norm": Suite(
        batch_norm_contracts,
        {
            batch_norm.counts_ranks_equally: batch_norm_contracts.check_whole_batch,
            batch_norm.normalizes_alone: batch_norm_contracts.check_whole_batch,
            batch_norm.ignores_other_ranks_in_backward: batch_norm_contracts.check_whole_batch,
            batch_norm.subtracts_large_numbers: batch_norm_contracts.check_large_mean,
            batch_norm.rounds_early: batch_norm_contracts.check_sixteen_bits,
            batch_norm.forgets_the_group: batch_norm_contracts.check_groups,
            batch_norm.weighs_losses_equally: batch_norm_contracts.check_training,
            batch_norm.ignores_given_weights: batch_norm_contracts.check_given_weights,
            batch_norm.counts_recomputed_batches_once: batch_norm_contracts.check_checkpointing,
            batch_norm.sends_twice: batch_norm_contracts.check_one_message,
        },
        placements=NODES,
    ),
    "parallel layers": Suite(
        parallel_layer_contracts,
        {
            parallel_layers.forgets_other_ranks_gradients: parallel_layer_contracts.check_layers,
            parallel_layers.adds_losses_of_all_ranks: parallel_layer_contracts.check_layers,
            parallel_layers.draws_its_own_part: parallel_layer_contracts.check_layers,
            parallel_layers.adds_the_bias_of_every_rank: parallel_layer_contracts.check_training,
            parallel_layers.forgets_the_bias: parallel_layer_contracts.check_states,
            parallel_layers.forgets_gradients_of_gradients: (
                parallel_layer_contracts.check_recomputation
            ),
        },
        raises=(ContractError, RuntimeError),  # torch's own, of shapes and graphs
    ),
}
PLACED = [(name, label) for name, suite in SUITES.items() for label in suite.placements]
WRONG = [(name, wrong) for name, suite in SUITES.items() for wrong in suite.caught_by]


@pytest.mark.parametrize(("suite", "label"), PLACED)
def test_over_gloo(suite: str, label: str) -> None:
    run_placed(SUITES[suite].placements[label], SUITES[suite].module.check_all)


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize(("suite", "label"), PLACED)
def test_over_mpi(mpi_pool: MpiPool, suite: str, label: str) -> None:
    name, topology = SUITES[suite].placements[label]
    mpi_pool.run(SUITES[suite].module.check_all, topology.size, name=name, topology=topology)


def against(contract: Contract, wrong: Any, patch: pytest.MonkeyPatch) -> Contract:
    """A contract as it meets a patch, a route, a communicator, or functions that are wrong."""
    if "patch" in signature(wrong).parameters:
        wrong(patch)
    elif not isinstance(wrong, type):
        return partial(contract, f=wrong())
    elif issubclass(wrong, Route):
        patch.setitem(create.ROUTES, "flat", wrong)
    else:
        patch.setattr(create, "Communicator", wrong)
    return contract


@pytest.mark.parametrize(("suite", "wrong"), WRONG, ids=[f"{s}-{w.__name__}" for s, w in WRONG])
def test_is_caught(suite: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = against(SUITES[suite].caught_by[wrong], wrong, monkeypatch)
    with pytest.raises(SUITES[suite].raises):
        run_ranks(contract, 3, timeout_s=limit(5))


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_contract_has_one_that_breaks_it(suite: Suite) -> None:
    assert set(suite.caught_by.values()) == set(suite.module.CONTRACTS)
