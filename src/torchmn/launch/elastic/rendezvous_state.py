"""Which hosts work together, when all start again, and when the job is over: decided in one place.

Hosts gather for a round, run, and gather again when something has changed: a worker failed, a host
was lost, or one that came back may enter. No sockets and no clock here: events come in, with the
time in seconds, and messages for hosts and for the launcher go out.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchmn.control.messages.elastic import (
    ElasticMessage,
    FileHeld,
    HostHello,
    HostLost,
    JobEnded,
    PruneOlder,
    Restart,
    Round,
    RoundEnding,
    RoundMember,
    Shutdown,
    StagedCheckpoint,
    UserMessage,
)
from torchmn.errors import UsageError
from torchmn.launch.host_checks import differences

LAUNCHER = ""
"""Receives what is for the launcher; no host has an empty name."""
_STOP_MARGIN_S = 30.0
_START_LIMIT_S = 60.0
"""How long a host that is connected may take until its agent runs, which imports torch."""

State = Literal["starting", "ready", "running", "stopping", "finished"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How few and how many hosts may work together, and how often all may start again.

    A start after a failure of a worker counts against ``max_restarts``, one because hosts left or
    came does not. ``join_timeout_s`` is the time for which fewer than ``least`` are waited for.
    """

    least: int
    most: int
    max_restarts: int = 3
    join_timeout_s: float = 120.0
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UsageError(
                f"--elastic is MIN:MAX with 1 <= MIN <= MAX, got {self.least}:{self.most}."
            )
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts is at least 0, got {self.max_restarts}.")
        if not 0 < self.join_timeout_s < float("inf"):
            raise UsageError(
                f"--join-timeout is a positive number of seconds, got {self.join_timeout_s}."
            )


@dataclass
class _Seat:
    """A host that is connected."""

    member: HostHello
    state: State = "starting"
    held: dict[tuple[StagedCheckpoint, str], FileHeld] = field(default_factory=dict)


class RendezvousState:
    """The rendezvous of the hosts with these names, whose order is that of their ranks."""

    def __init__(self, hosts: Sequence[str], limits: Limits, *, now: float) -> None:
        self._hosts = list(hosts)
        self._limits = limits
        self._seats: dict[str, _Seat] = {}
        self._absent: set[str] = set()
        self._phase: Literal["gathering", "running", "over"] = "gathering"
        self._since = now
        self._number = 0
        self._members: list[str] = []  # of the round that runs or ran last
        self._num_restarts = 0
        self._whys: list[str] = []
        self._has_failure = False
        self._has_loss = False
        self._complete: StagedCheckpoint = StagedCheckpoint(0, -1, "")
        self._posts: list[tuple[str, ElasticMessage]] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing will run any more."""
        return self._phase == "over"

    def take_posts(self) -> list[tuple[str, ElasticMessage]]:
        """What is to be sent to whom since the last call."""
        posts, self._posts = self._posts, []
        return posts

    # ---- events -------------------------------------------------------------------------------

    def came(self, member: HostHello) -> bool:
        """A host has passed the gate. Whether it may stay."""
        problem = self._why_not(member)
        if problem:
            self._post(member.host, Shutdown(signum=signal.SIGTERM, text=problem))
            self._post(LAUNCHER, UserMessage(text=f"{member.host} cannot take part: {problem}."))
            return False
        self._seats[member.host] = _Seat(member)
        self._absent.discard(member.host)
        if self._phase == "running":
            self._post(
                LAUNCHER,
                UserMessage(
                    text=f"{member.host} is here and waits for the next finished checkpoint."
                ),
            )
        return True

    def arrived(self, host: str, held: Sequence[FileHeld], now: float) -> None:
        """A host has no workers now and waits: at the start, asked to, or since one failed."""
        seat = self._seats[host]
        was_running = seat.state == "running"
        seat.state = "ready"
        seat.held = {(stored.checkpoint, stored.file): stored for stored in held}
        if was_running:
            self._has_failure = True
            self._gather(f"a worker on {host} failed", now)
        self._start_if_complete(now)

    def stored(self, host: str, stored: FileHeld, now: float) -> None:
        """A host holds one more file in memory; all files of one are a finished checkpoint."""
        self._seats[host].held[stored.checkpoint, stored.file] = stored
        # held twice, so that the older ones are still there if a host is lost right now
        found = self._newest_copies(self._members, min(2, len(self._members)))
        if found is not None and found > self._complete:
            self._complete = found
            for name, seat in self._seats.items():
                seat.held = {key: held for key, held in seat.held.items() if key[0] >= found}
                self._post(name, PruneOlder(checkpoint=found))
            self.announced(found.step, now)

    def announced(self, step: int, now: float) -> None:
        """A checkpoint is finished: hosts that wait may enter, and all go on from it."""
        if self._phase != "running":
            return
        room = self._limits.most - len(self._members)
        waiting = [name for name in self._hosts if self._is_waiting(name)][: max(0, room)]
        if waiting:
            self._gather(f"{' and '.join(waiting)} came, and step {step} is saved", now)
            self._start_if_complete(now)

    def finished(self, host: str) -> None:
        """All workers of a host have ended well."""
        self._seats[host].state = "finished"
        left = [self._seats[name] for name in self._members if name in self._seats]
        if self._phase == "running" and all(seat.state == "finished" for seat in left):
            self._end("")

    def lost(self, host: str, why: str, now: float) -> None:
        """A host is gone with its workers and the copies that it held."""
        seat = self._seats.pop(host, None)
        if seat is None or self._phase == "over":
            return
        self._post(LAUNCHER, HostLost(host=host, text=why))
        if host in self._members and seat.state != "finished":
            self._has_loss = True
            self._gather(f"{host} was lost", now)
        if self._phase == "gathering" and self._number == 0:
            self._absent.add(host)
        self._start_if_complete(now)

    def absent(self, host: str, now: float) -> None:
        """A host could not be reached: the first round need not wait for it."""
        if host not in self._seats:
            self._absent.add(host)
            self._start_if_complete(now)

    def stop(self, signum: int) -> None:
        """The user, or the scheduler, ends the job."""
        self._end("", signum)

    def tick(self, now: float) -> list[str]:
        """Enforce the limits. The hosts to hang up on, since they did not stop in time."""
        if self._phase != "gathering":
            return []
        late: list[str] = []
        stop_s = self._limits.grace_s + _STOP_MARGIN_S
        if now > self._since + stop_s:
            late = [name for name, seat in self._seats.items() if seat.state == "stopping"]
            for name in late:
                self.lost(name, f"its workers did not stop within {stop_s:g} s", now)
        late_s = now - self._since - self._limits.join_timeout_s
        if self._phase == "gathering" and late_s > 0:
            self._start_if_complete(now)
            has_enough = len(self._seats) >= self._limits.least
            is_starting = has_enough and late_s < _START_LIMIT_S
            if self._phase == "gathering" and not self._is_stopping and not is_starting:
                self._give_up()
        return late

    # ---- decisions ----------------------------------------------------------------------------

    def _why_not(self, member: HostHello) -> str:
        """Why a host cannot take part, in words; empty if it can."""
        if self._phase == "over":
            return "the job is over"
        if member.host not in self._hosts:
            return f"the job's hosts are {', '.join(self._hosts)}"
        others = {name: seat.member.versions for name, seat in self._seats.items()}
        differing = differences({**others, member.host: member.versions})
        return f"{differing}: install the same on all hosts" if differing else ""

    def _is_waiting(self, name: str) -> bool:
        return name in self._seats and self._seats[name].state == "ready"

    @property
    def _is_stopping(self) -> bool:
        return any(seat.state == "stopping" for seat in self._seats.values())

    def _gather(self, why: str, now: float) -> None:
        """Let all hosts end their workers and come."""
        if self._phase == "over":
            return
        self._whys.append(why)
        self._post(LAUNCHER, RoundEnding(reason=why))
        if self._phase == "running":
            self._phase, self._since = "gathering", now
        for name, seat in self._seats.items():
            if seat.state in ("running", "finished"):
                seat.state = "stopping"
                self._post(name, Restart())

    def _start_if_complete(self, now: float) -> None:
        """Start a round once nobody runs any more and enough hosts are there."""
        if self._phase != "gathering" or self._is_stopping:
            return
        ready = [name for name in self._hosts if self._is_waiting(name)]
        is_late = now > self._since + self._limits.join_timeout_s
        if self._number == 0 and not is_late:
            awaited = [name for name in self._hosts if name not in self._absent]
            if len(ready) < min(len(awaited), self._limits.most):
                return
        if len(ready) < self._limits.least:
            return
        if self._has_failure and not self._has_loss:
            if self._num_restarts >= self._limits.max_restarts:
                times = f"all {self._limits.max_restarts} restarts were used up"
                self._end(f"{'; '.join(self._whys)}, and {times}")
                return
            self._num_restarts += 1
        self._start(ready)

    def _start(self, ready: list[str]) -> None:
        chosen = [name for name in ready if name in self._members]
        chosen += [name for name in ready if name not in self._members]
        chosen = [name for name in ready if name in chosen[: self._limits.most]]
        self._number += 1
        self._members, self._phase = chosen, "running"
        found = self._newest_copies(chosen)
        self._complete = found or self._complete  # what comes from now on is newer
        holders: dict[str, list[int]] = {}
        for index, name in enumerate(chosen):
            seat = self._seats[name]
            seat.held = {key: held for key, held in seat.held.items() if key[0] == found}
            for _, file in seat.held:
                holders.setdefault(file, []).append(index)
        message = Round(
            number=self._number,
            members=[self._described(name) for name in chosen],
            num_restarts=self._num_restarts,
            reason="; ".join(self._whys),
            restored=found,
            holders=holders,
        )
        for name in chosen:
            self._seats[name].state = "running"
            self._post(name, message)
        self._post(LAUNCHER, message)
        self._whys, self._has_failure, self._has_loss = [], False, False

    def _described(self, name: str) -> RoundMember:
        member = self._seats[name].member
        return RoundMember(
            host=name,
            slots=member.slots,
            address=member.address,
            replica_port=member.replica_port,
        )

    def _newest_copies(self, names: Sequence[str], num_holders: int = 1) -> StagedCheckpoint | None:
        """The newest checkpoint that these hosts hold whole, each file by ``num_holders`` of them.

        A later round is newer even at a lower step: it may have gone on from an older checkpoint.
        """
        held = Counter(key for name in names if name in self._seats for key in self._held(name))
        manifests = {
            stored.checkpoint: stored.needs
            for name in names
            if name in self._seats
            for stored in self._seats[name].held.values()
            if stored.needs
        }
        for draft in sorted(manifests, reverse=True):
            if all(held[draft, file] >= num_holders for file in manifests[draft]):
                return draft
        return None

    def _held(self, name: str) -> list[tuple[StagedCheckpoint, str]]:
        return list(self._seats[name].held)

    def _give_up(self) -> None:
        here = [name for name in self._hosts if name in self._seats]
        causes = f"{'; '.join(self._whys)}; " if self._whys else ""
        self._end(
            f"{causes}{len(here)} host(s) were there ({', '.join(here) or 'none'}) and at least "
            f"{self._limits.least} are needed, for which {self._limits.join_timeout_s:g} s were "
            "waited (--join-timeout)"
        )

    def _end(self, text: str, signum: int = signal.SIGTERM) -> None:
        if self._phase == "over":
            return
        self._phase = "over"
        for name in self._seats:
            self._post(name, Shutdown(signum=signum, text=text))
        self._post(LAUNCHER, JobEnded(text=text))

    def _post(self, host: str, message: ElasticMessage) -> None:
        self._posts.append((host, message))
