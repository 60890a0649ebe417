"""Messages about failures and hangs, from scripts and agents to the process that monitors all."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torchmn.control.codec import Record


class ProcessState(Enum):
    """What the operating system reports about a process."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    DEVICE_WAIT = "device_wait"
    STOPPED = "stopped"
    TRACED = "traced"
    EXITED = "exited"
    GONE = "gone"
    UNKNOWN = "unknown"

    @property
    def is_halted(self) -> bool:
        """Whether the process will not continue without outside help."""
        return self not in (ProcessState.RUNNING, ProcessState.SLEEPING, ProcessState.UNKNOWN)


class MonitorHello(Record, frozen=True, kw_only=True):
    """Rank monitor, to authenticate: the rank, host and process of the script that it monitors.

    ``monitor_pid`` is its own process.
    """

    rank: int
    host: str
    pid: int
    monitor_pid: int


class Failed(Record, frozen=True, kw_only=True):
    """Script: an error ends it with this status. ``traceback`` is what was printed of it.

    ``error`` is the end of it, the type and the message, which may have several lines.
    ``is_consequence``: the error only reports that another rank has ended or does not answer.
    ``at`` is in seconds since the epoch.
    """

    status: int
    traceback: str
    error: str
    is_consequence: bool
    at: float


class Leaving(Record, frozen=True, kw_only=True):
    """Script: its end is reached, most likely with this exit status."""

    status: int


class Joining(Record, frozen=True, kw_only=True):
    """Script: it joins the other ranks, all of which must arrive within the limit."""

    limit_s: float


class Joined(Record, frozen=True):
    """Script: all ranks have joined."""


class Overdue(Record, frozen=True, kw_only=True):
    """Script: this collective of this group has not completed within its time limit."""

    group: str
    number: int
    limit_s: float


class CollectiveStatus(Record, frozen=True, kw_only=True):
    """The newest collective of one group on one rank; without ``ranks`` all of the job take part.

    ``where`` names the bucket and the step, if known; ``state`` is ``"done"`` once it is complete.
    """

    group: str
    number: int
    ranks: tuple[int, ...] = ()
    what: str = "a collective"
    where: str = ""
    state: str = ""
    age_s: float = 0.0


class CheckpointSaved(Record, frozen=True, kw_only=True):
    """Script of rank 0: all ranks have finished the checkpoint of this step.

    The launcher of an elastic job passes it on to the rendezvous.
    """

    step: int


class StatusRequest(Record, frozen=True, kw_only=True):
    """Supervisor: requests a `StatusReply` from every rank.

    After ``limit_s`` the agent replies in place of a script that has not.
    """

    limit_s: float


class StatusReply(Record, frozen=True, kw_only=True):
    """Script, or its agent in its place: what the rank is doing.

    ``process`` is set where the script did not answer: the state of its process, which waits in the
    kernel's function ``kernel_function`` if the system tells. ``script_stack`` is the part of
    ``stacks`` that shows the script's own code.
    """

    collectives: tuple[CollectiveStatus, ...] = ()
    stacks: str = ""
    script_stack: str = ""
    process: ProcessState | None = None
    kernel_function: str = ""


class HeartbeatRequest(Record, frozen=True):
    """Requests an `Alive`: either side of a connection may ask."""


class StoppedProcess(NamedTuple):
    """A process that a signal has stopped, and its program."""

    pid: int
    name: str


class Alive(Record, frozen=True, kw_only=True):
    """The answer to a `HeartbeatRequest`; ``stopped`` are processes near the one that answers."""

    stopped: list[StoppedProcess]


MonitorMessage = (
    MonitorHello
    | Failed
    | Leaving
    | Joining
    | Joined
    | Overdue
    | CheckpointSaved
    | StatusRequest
    | StatusReply
    | HeartbeatRequest
    | Alive
)
