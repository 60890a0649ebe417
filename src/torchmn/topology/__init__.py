"""Where things are: facts only. Starts without torch; reading a fact changes nothing."""

from torchmn.topology.placement import Place, Topology

__all__ = ["Place", "Topology"]
