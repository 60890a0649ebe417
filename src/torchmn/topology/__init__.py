"""Where things are: facts only. Starts without torch; reading a fact changes nothing."""

from torchmn.topology.allocation import Allocation, allocation
from torchmn.topology.cpus import Processors, Share, available_processors, share_of
from torchmn.topology.gpu_locality import gpu_neighbourhoods, memory_nodes, share_beside
from torchmn.topology.gpus import count_gpus
from torchmn.topology.hostlists import Host, parse_hostfile, parse_hosts, seat
from torchmn.topology.launcher_env import LaunchedPlace, launched_place, raise_if_contradicted
from torchmn.topology.network import Route, is_this_host, own_address_towards, route_of, route_to
from torchmn.topology.placement import Place, Topology

__all__ = [
    "Allocation",
    "Host",
    "LaunchedPlace",
    "Place",
    "Processors",
    "Route",
    "Share",
    "Topology",
    "allocation",
    "available_processors",
    "count_gpus",
    "gpu_neighbourhoods",
    "is_this_host",
    "launched_place",
    "memory_nodes",
    "own_address_towards",
    "parse_hostfile",
    "parse_hosts",
    "raise_if_contradicted",
    "route_of",
    "route_to",
    "seat",
    "share_beside",
    "share_of",
]
