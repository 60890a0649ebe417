"""Where things are: facts only. Starts without torch; reading a fact changes nothing."""

from torchmn.topology.environment import LaunchedPlace, launched_place, raise_if_contradicted
from torchmn.topology.gpus import count_gpus
from torchmn.topology.placement import Place, Topology
from torchmn.topology.processors import Processors, Share, available_processors, share_of

__all__ = [
    "LaunchedPlace",
    "Place",
    "Processors",
    "Share",
    "Topology",
    "available_processors",
    "count_gpus",
    "launched_place",
    "raise_if_contradicted",
    "share_of",
]
