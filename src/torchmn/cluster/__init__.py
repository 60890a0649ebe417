"""Cluster topology, read-only: hosts, ranks, cores, GPUs and networks. Starts without torch."""

from torchmn.cluster.placement import RankPlacement, Topology

__all__ = [
    "RankPlacement",
    "Topology",
]
