"""By which path a mean goes."""

from torchmn.communicators.base import Communicator
from torchmn.communicators.create import ROUTES, create_communicator
from torchmn.communicators.engine import Work
from torchmn.communicators.mailbox import ANY_SOURCE, ANY_TAG, Status
from torchmn.transports import Transport

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "ROUTES",
    "Communicator",
    "Status",
    "Transport",
    "Work",
    "create_communicator",
]
