"""Communicators: the ranks of a job, their collectives, and routes of all-reduce."""

from torchmn.base.names import RouteName
from torchmn.comm.base import Communicator
from torchmn.comm.create import create_communicator
from torchmn.comm.engine import Work
from torchmn.comm.grid import Grid
from torchmn.comm.point_to_point import ANY_SOURCE, ANY_TAG, Status
from torchmn.comm.transports.base import Transport
from torchmn.comm.waiting import Timeout

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "Communicator",
    "Grid",
    "RouteName",
    "Status",
    "Timeout",
    "Transport",
    "Work",
    "create_communicator",
]
