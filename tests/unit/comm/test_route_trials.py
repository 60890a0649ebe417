"""Plain rules on one node, trials between nodes."""

import time

import pytest
import torch

from tests.limits import limit
from torchmn.cluster import Topology
from torchmn.comm.create import candidate_routes, fastest
from torchmn.comm.link_speed import measure_links
from torchmn.errors import CommunicationError
from torchmn.testing import run_ranks


@pytest.mark.parametrize(
    ("nodes", "device", "name", "why"),
    [
        ([1], "cpu", "single_node", "all 1 ranks share a node"),
        ([4], "cpu", "single_node", "all 4 ranks share a node"),
        ([2, 2], "cpu", "hierarchical", "4 ranks on 2 nodes"),
        ([3, 1], "cpu", "hierarchical", "before anything crosses the network"),
        ([2], "cuda:0", "pure_nccl", "every rank has a GPU"),
    ],
)
def test_choice_and_reason(nodes: list[int], device: str, name: str, why: str) -> None:
    chosen, *_ = candidate_routes(Topology.blocks(nodes), torch.device(device)).items()
    assert chosen[0] == name
    assert why in chosen[1]


@pytest.mark.parametrize(("nodes", "name"), [([2], "single_node"), ([2, 2], "hierarchical")])
def test_gpus_without_nccl_take_the_routes_of_cpus(nodes: list[int], name: str) -> None:
    device = torch.device("cuda", 0)
    assert next(iter(candidate_routes(Topology.blocks(nodes), device, has_nccl=False))) == name


def test_two_dimensional_is_a_candidate_for_balanced_nodes() -> None:
    both = ["hierarchical", "two_dimensional"]
    assert list(candidate_routes(Topology.blocks([2, 2]), torch.device("cpu"))) == both
    for nodes in ([2, 1], [1, 1]):
        assert list(candidate_routes(Topology.blocks(nodes), torch.device("cpu"))) == both[:1]


@pytest.mark.parametrize(("slow", "expected"), [("first", "second"), ("second", "first")])
def test_the_fastest_is_kept_and_the_others_are_closed(slow: str, expected: str) -> None:
    def rank_main(comm):
        made = {name: comm.split(0, comm.rank) for name in ("first", "second")}
        sum_ = made[slow].route.sum_
        if comm.rank == 1:  # slow on one rank is slow for all
            made[slow].route.sum_ = lambda buffer: (time.sleep(limit(0.1)), sum_(buffer))
        name, kept, measured = fastest({n: (lambda n=n: made[n]) for n in made})
        assert kept is made[name]
        kept.barrier()
        with pytest.raises(CommunicationError, match="was finalized"):
            made[slow].barrier()
        assert "first" in measured
        assert "second" in measured
        return name

    assert run_ranks(rank_main, 3) == [expected] * 3


def test_links_have_the_same_speed_on_all_ranks() -> None:
    def rank_main(comm):
        return comm.engine.call(lambda: measure_links(comm.world))

    speeds = run_ranks(rank_main, 3)
    assert speeds == speeds[:1] * 3
    assert speeds[0].seconds(speeds[0].bandwidth_bytes_per_s) > 1
    assert run_ranks(rank_main, 1) == [None]
