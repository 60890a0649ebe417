"""Cluster topology, read-only: hosts, ranks, cores, GPUs and networks. Starts without torch."""

from torchmn.cluster.allocation import Allocation, allocation, is_scheduled
from torchmn.cluster.cpus import (
    CpuAssignment,
    Processors,
    assign_cpus,
    available_processors,
    cores_near_gpu,
)
from torchmn.cluster.gpus import count_gpus, gpu_localities, may_share_gpus, memory_nodes
from torchmn.cluster.hostlists import Host, parse_hostfile, parse_hosts, select_hosts
from torchmn.cluster.launcher_env import LauncherInfo, raise_if_contradicted, read_launcher_env
from torchmn.cluster.network import (
    Route,
    is_this_host,
    local_address_among,
    local_address_for,
    route_of,
    route_to,
)
from torchmn.cluster.placement import RankPlacement, Topology

__all__ = [
    "Allocation",
    "CpuAssignment",
    "Host",
    "LauncherInfo",
    "Processors",
    "RankPlacement",
    "Route",
    "Topology",
    "allocation",
    "assign_cpus",
    "available_processors",
    "cores_near_gpu",
    "count_gpus",
    "gpu_localities",
    "is_scheduled",
    "is_this_host",
    "local_address_among",
    "local_address_for",
    "may_share_gpus",
    "memory_nodes",
    "parse_hostfile",
    "parse_hosts",
    "raise_if_contradicted",
    "read_launcher_env",
    "route_of",
    "route_to",
    "select_hosts",
]
