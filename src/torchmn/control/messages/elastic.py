"""Messages between the launcher, the rendezvous and the hosts of an elastic job.

Hosts and the launcher authenticate with `HostHello` and `LauncherHello`; the rest follows.
"""

from __future__ import annotations

from typing import NamedTuple

from torchmn.control.codec import Record


class StagedCheckpoint(NamedTuple):
    """A checkpoint in memory, complete or not; a later one compares greater."""

    round: int
    step: int
    name: str


class LauncherHello(Record, frozen=True, kw_only=True):
    """Launcher, to authenticate: it shows what happens, and the job ends when it does."""

    pid: int


class HostHello(Record, frozen=True, kw_only=True):
    """Host, to authenticate; its checkpoint replicas are served at ``address:replica_port``."""

    host: str
    slots: int
    address: str
    replica_port: int
    versions: dict[str, str]


class PeerHello(Record, frozen=True, kw_only=True):
    """Host, to authenticate at another host: it stores or fetches checkpoint replicas."""

    host: str


class FileHeld(Record, frozen=True, kw_only=True):
    """Host: it now holds this file of a checkpoint in memory.

    ``needs`` names all files of the checkpoint; it comes with the last of them, the manifest.
    """

    checkpoint: StagedCheckpoint
    file: str
    needs: tuple[str, ...] = ()


class HostReady(Record, frozen=True, kw_only=True):
    """Host: no worker runs on it, it waits for the next round and holds these files."""

    held: list[FileHeld]


class CheckpointSaved(Record, frozen=True, kw_only=True):
    """Host of rank 0: all ranks have finished the checkpoint of this step."""

    step: int


class HostFinished(Record, frozen=True):
    """Host: all its workers have exited with status 0."""


class Restart(Record, frozen=True):
    """Rendezvous: end the workers and come back for the next round."""


class RoundMember(Record, frozen=True, kw_only=True):
    """A host that takes part in a round; see `HostHello`."""

    host: str
    slots: int
    address: str
    replica_port: int


class Round(Record, frozen=True, kw_only=True):
    """Rendezvous, to the hosts that take part, in the order of their ranks, and to the launcher.

    ``restored`` is the newest checkpoint of which every file is held in memory by one of them, and
    ``holders`` the indices of the members that hold each file. ``reason`` is what ended the round
    before.
    """

    number: int
    members: list[RoundMember]
    num_restarts: int
    reason: str
    restored: StagedCheckpoint | None
    holders: dict[str, list[int]]


class PruneOlder(Record, frozen=True, kw_only=True):
    """Rendezvous: this checkpoint is complete in memory; delete older ones."""

    checkpoint: StagedCheckpoint


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
    | PeerHello
    | HostReady
    | FileHeld
    | CheckpointSaved
    | HostFinished
    | Restart
    | Round
    | PruneOlder
    | Shutdown
    | UserMessage
    | RoundEnding
    | HostLost
    | JobEnded
    | HostUnreachable
    | Stop
)
