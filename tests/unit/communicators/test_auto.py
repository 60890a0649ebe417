"""Plain rules by topology and device."""

from __future__ import annotations

import pytest
import torch

from torchmn.communicators.auto import choose_route
from torchmn.testing import run_ranks
from torchmn.topology import Topology


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
    chosen, reason = choose_route(Topology.blocks(nodes), torch.device(device))
    assert chosen == name
    assert why in reason


@pytest.mark.parametrize(("nodes", "name"), [([2], "single_node"), ([2, 1], "hierarchical")])
def test_a_communicator_says_what_it_became(nodes: list[int], name: str) -> None:
    topology = Topology.blocks(nodes)

    def rank_main(comm):
        assert comm.reason
        return comm.name

    assert run_ranks(rank_main, topology.size, name="auto", topology=topology) == [name] * sum(
        nodes
    )
