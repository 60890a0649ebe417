"""The asynchronous parameter server."""

from torchmn.exchange.server.parameter_server import ParameterServer
from torchmn.exchange.server.staleness import Staleness, WorkerStaleness

__all__ = ["ParameterServer", "Staleness", "WorkerStaleness"]
