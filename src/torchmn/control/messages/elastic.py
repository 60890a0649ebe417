"""What the launcher, the rendezvous and the hosts of an elastic job tell each other.

A host says who it is at the gate (`HostHello`), the launcher too (`LauncherHello`); the rest follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

StagedCheckpoint = tuple[int, int, str]
"""(round, step, name) of a checkpoint in memory, complete or not."""


@dataclass(frozen=True, kw_only=True)
class LauncherHello:
    """Launcher, at the gate: I show what happens, and the job ends with me."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class HostHello:
    """Host, at the gate: who I am, and at which port of ``address`` my copies can be had."""

    host: str
    slots: int
    address: str
    copies_port: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class PeerHello:
    """Host, at another host's gate: I bring copies, or fetch some."""

    host: str


@dataclass(frozen=True, kw_only=True)
class FileHeld:
    """Host: now I hold this file of a checkpoint, too.

    ``needs`` are all files of a checkpoint, known with the last one of them, its manifest.
    """

    round: int
    step: int
    draft: str
    file: str
    needs: list[str]

    @property
    def of(self) -> StagedCheckpoint:
        """The checkpoint that it is a part of."""
        return self.round, self.step, self.draft


@dataclass(frozen=True, kw_only=True)
class HostReady:
    """Host: none of my workers runs, I wait for the next round, and hold these (`FileHeld`)."""

    held: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """Host of rank 0: the checkpoint of this step is finished, all ranks' parts of it."""

    step: int


@dataclass(frozen=True, kw_only=True)
class HostFinished:
    """Host: all my workers have ended well."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Rendezvous: end your workers and come back for the next round."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Rendezvous, to the hosts that take part, in this order, and to the launcher.

    ``restored`` is the newest checkpoint of which every file is held in memory by one of them:
    (round, step, name), empty if there is none, and ``holders`` says for each file which members
    hold it. ``why`` says what ended the round before.
    """

    number: int
    members: list[dict[str, str | int]]
    num_restarts: int
    why: str
    restored: list[int | str]
    holders: dict[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class PruneOlder:
    """Rendezvous: this checkpoint is complete in memory, forget those that are older."""

    round: int
    step: int
    draft: str


@dataclass(frozen=True, kw_only=True)
class Shutdown:
    """Rendezvous: the job is over, or goes on without you. End your workers by this signal."""

    signum: int
    text: str


@dataclass(frozen=True, kw_only=True)
class UserMessage:
    """Rendezvous, to the launcher: a sentence for the user."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RoundEnding:
    """Rendezvous, to the launcher: this round is at its end, its workers stop."""

    why: str


@dataclass(frozen=True, kw_only=True)
class HostLost:
    """Rendezvous, to the launcher: nothing is to be heard of this host any more."""

    host: str
    text: str


@dataclass(frozen=True, kw_only=True)
class JobEnded:
    """Rendezvous, to the launcher: the job is over; ``text`` says why if it failed."""

    text: str


@dataclass(frozen=True, kw_only=True)
class HostUnreachable:
    """Launcher: this host could not be reached, do not wait for it."""

    host: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Stop:
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
