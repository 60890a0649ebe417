"""The asynchronous parameter server."""

from torchmn.exchange.schedules.parameter_server.schedule import ParameterServer
from torchmn.exchange.schedules.parameter_server.staleness import Staleness, WorkerStaleness

__all__ = ["ParameterServer", "Staleness", "WorkerStaleness"]
