"""What a script, or who watches it, says of failures and hangs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class MonitorHello:
    """RankMonitor: I watch the script of this rank, this process on this host."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Script: I am about to end with this status; ``words`` are the last ones.

    ``is_consequence``: because another rank has ended or does not answer. ``at`` is the time since
    the epoch in seconds.
    """

    status: int
    words: str
    is_consequence: bool
    at: float


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """Script: the end of the program is reached, most likely with this status."""

    status: int


@dataclass(frozen=True, kw_only=True)
class Joining:
    """Script: I join the other ranks, which must have come within the limit."""

    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Script: all ranks have come."""


@dataclass(frozen=True, kw_only=True)
class Overdue:
    """Script: this collective of this group has not completed in time."""

    group: str
    number: int
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class StatusRequest:
    """Supervisor: what are you doing?"""


@dataclass(frozen=True, kw_only=True)
class StatusReply:
    """Script, or its agent in its place: what it is doing.

    ``collectives`` holds the last one of each group; see `Collective`. ``state`` is the process's
    state in words where the script itself did not answer.
    """

    collectives: list[dict[str, object]] = field(default_factory=list)
    stacks: str = ""
    state: str = ""


MonitorMessage = (
    MonitorHello | Failed | Leaving | Joining | Joined | Overdue | StatusRequest | StatusReply
)
