"""Which route to take when the user does not say: plain rules by topology and device."""

from __future__ import annotations

import torch

from torchmn.topology import Topology


def choose_route(topology: Topology, device: torch.device) -> tuple[str, str]:
    """(name of a route, why). A pure function of facts that are the same on every rank."""
    if device.type == "cuda":
        return "pure_nccl", "every rank has a GPU, and NCCL finds its own way"
    if len(topology.nodes) == 1:
        return "single_node", f"all {topology.size} ranks share a node"
    return "hierarchical", f"{topology}: sum in the node before anything crosses the network"
