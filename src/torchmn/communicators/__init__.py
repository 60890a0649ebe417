"""By which path a mean goes."""

from torchmn.communicators.base import Communicator
from torchmn.communicators.create import ROUTES, create_communicator
from torchmn.communicators.transports import Transport

__all__ = ["ROUTES", "Communicator", "Transport", "create_communicator"]
