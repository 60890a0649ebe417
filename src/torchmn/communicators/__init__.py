"""Communicators: the ranks of a job, their collectives, and routes of all-reduce."""

from torchmn.communicators.base import Communicator
from torchmn.communicators.create import ROUTES, create_communicator
from torchmn.communicators.engine import Work
from torchmn.communicators.grid import Grid
from torchmn.communicators.point_to_point import ANY_SOURCE, ANY_TAG, Status
from torchmn.transports import Transport

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "ROUTES",
    "Communicator",
    "Grid",
    "Status",
    "Transport",
    "Work",
    "create_communicator",
]
