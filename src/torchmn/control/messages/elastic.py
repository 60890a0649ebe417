"""Messages between the launcher, the rendezvous and the hosts of an elastic job.

Hosts and the launcher authenticate with `HostHello` and `LauncherHello`; the rest follows.
"""

from __future__ import annotations

from torchmn.control.codec import Record


class LauncherHello(Record, frozen=True, kw_only=True):
    """Launcher, to authenticate: it shows what happens, and the job ends when it does."""

    pid: int


class HostHello(Record, frozen=True, kw_only=True):
    """Host, to authenticate: it offers ``slots`` ranks."""

    host: str
    slots: int
    versions: dict[str, str]


class HostReady(Record, frozen=True):
    """Host: no worker runs on it, it waits for the next round."""


class HostFinished(Record, frozen=True):
    """Host: all its workers have exited with status 0."""


class Restart(Record, frozen=True):
    """Rendezvous: end the workers and come back for the next round."""


class RoundMember(Record, frozen=True, kw_only=True):
    """A host that takes part in a round; see `HostHello`."""

    host: str
    slots: int


class Round(Record, frozen=True, kw_only=True):
    """Rendezvous, to the hosts that take part, in the order of their ranks, and to the launcher.

    ``reason`` is what ended the round before.
    """

    number: int
    members: list[RoundMember]
    num_restarts: int
    reason: str


class Shutdown(Record, frozen=True, kw_only=True):
    """Rendezvous: the job is over, or continues without this host. End the workers."""

    signum: int
    text: str


class UserMessage(Record, frozen=True, kw_only=True):
    """Rendezvous, to the launcher: a message for the user."""

    text: str


class RoundEnding(Record, frozen=True, kw_only=True):
    """Rendezvous, to the launcher: this round ends, its workers are stopped."""

    reason: str


class HostLost(Record, frozen=True, kw_only=True):
    """Rendezvous, to the launcher: the connection to this host is lost."""

    host: str
    text: str


class JobEnded(Record, frozen=True, kw_only=True):
    """Rendezvous, to the launcher: the job is over; ``text`` is the reason if it failed."""

    text: str


class HostUnreachable(Record, frozen=True, kw_only=True):
    """Launcher: this host could not be reached; do not wait for it."""

    host: str
    text: str


class Stop(Record, frozen=True, kw_only=True):
    """Launcher: end the job by this signal."""

    signum: int


ElasticMessage = (
    LauncherHello
    | HostHello
    | HostReady
    | HostFinished
    | Restart
    | Round
    | Shutdown
    | UserMessage
    | RoundEnding
    | HostLost
    | JobEnded
    | HostUnreachable
    | Stop
)
