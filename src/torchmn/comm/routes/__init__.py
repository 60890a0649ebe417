"""Routes: the paths by which a sum travels over ranks and nodes, a class each."""

from torchmn.comm.routes.flat import FlatCommunicator, NaiveCommunicator
from torchmn.comm.routes.hierarchical import HierarchicalCommunicator, NonCudaAwareCommunicator
from torchmn.comm.routes.pure_nccl import PureNcclCommunicator
from torchmn.comm.routes.single_node import SingleNodeCommunicator
from torchmn.comm.routes.two_dimensional import TwoDimensionalCommunicator

__all__ = [
    "FlatCommunicator",
    "HierarchicalCommunicator",
    "NaiveCommunicator",
    "NonCudaAwareCommunicator",
    "PureNcclCommunicator",
    "SingleNodeCommunicator",
    "TwoDimensionalCommunicator",
]
