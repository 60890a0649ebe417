"""The rules of the rendezvous: which hosts take part, when they restart, when the job is over.

Hosts gather for a round, run, and gather again when a rank failed, a host was lost or leaves, or
another one may join. No sockets and no clock here: events come in, with the time in seconds, and
messages for hosts and decisions for the launcher go out.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchmn.base.errors import UsageError
from torchmn.cluster.units import counted
from torchmn.control.messages import HostHello, Message, Restart, Round, RoundMember, Shutdown
from torchmn.run.host_checks import differences

_STOP_MARGIN_S = 30.0
# Hosts that start together arrive within seconds. Later ones wait for a checkpoint.
_LAST_CALL_S = 5.0

State = Literal["new", "ready", "running", "stopping", "finished"]


JOIN_TIMEOUT_S = 120
RANK_FAILED = "a rank failed"  # why a job of fixed hosts has ended, as far as the hosts know


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Minimum and maximum number of hosts, and of restarts.

    A restart after a failure of a rank counts against ``max_restarts``, one because hosts left or
    joined does not. ``join_timeout_s`` is the time to wait for ``min_hosts``. With ``is_fixed`` the
    job ends when one of its hosts is lost or leaves, and no other one may take its place.
    """

    min_hosts: int
    max_hosts: int
    max_restarts: int = 3
    join_timeout_s: float = JOIN_TIMEOUT_S
    grace_s: float = 5.0
    is_fixed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_hosts <= self.max_hosts:
            raise UsageError(
                "--elastic must be MIN:MAX with 1 <= MIN <= MAX, got "
                f"{self.min_hosts}:{self.max_hosts}."
            )
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts must be at least 0, got {self.max_restarts}.")
        if not 0 < self.join_timeout_s < float("inf"):
            raise UsageError(
                "The SECONDS of --elastic MIN:MAX:SECONDS must be a positive number, got "
                f"{self.join_timeout_s:g}."
            )


@dataclass(frozen=True, kw_only=True)
class UserMessage:
    """A message for the user."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RoundEnding:
    """Decision that the round ends. Hosts are told to terminate its ranks."""


@dataclass(frozen=True, kw_only=True)
class HostLost:
    """Decision to give up a host whose connection is lost; ``text`` says why, for the user."""

    host: str
    text: str


@dataclass(frozen=True, kw_only=True)
class JobEnded:
    """Decision that the job is over; ``text`` is the reason if it failed, else empty."""

    text: str


Decision = Round | RoundEnding | HostLost | UserMessage | JobEnded


@dataclass
class _Host:
    """A host that is connected. ``leaves`` is why it will leave; empty if it stays."""

    member: HostHello
    state: State = "new"
    leaves: str = ""


class RendezvousState:
    """Decides on the rounds of an elastic job.

    Ranks are numbered by the ``node_rank`` of their hosts; without one in the order of ``hosts``,
    which the launcher starts. Given ``own``, of the launcher's own host, others that know the
    secret and run the same command may join, and come last.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        limits: Limits,
        *,
        now: float,
        own: HostHello | None = None,
    ) -> None:
        self._own = own
        self._started = tuple(hosts)
        self._hosts = list(hosts)  # with those that have joined, in the order of their arrival
        self._limits = limits
        self._connected: dict[str, _Host] = {}
        self._absent: set[str] = set()
        self._phase: Literal["gathering", "running", "over"] = "gathering"
        self._since = now
        self._number = 0
        self._members: list[str] = []  # of the round that runs or ran last
        self._num_restarts = 0
        self._reasons: list[str] = []
        self._has_failure = False
        self._has_loss = False
        self._leavers: list[str] = []  # hosts of the round that will leave, and why
        self._arrived_at = now  # when the last host did
        self._messages: list[tuple[str, Message]] = []
        self._decisions: list[Decision] = []

    @property
    def is_over(self) -> bool:
        """Whether the job is over, so that no further round begins."""
        return self._phase == "over"

    def drain_messages(self) -> list[tuple[str, Message]]:
        """Return the (host, message) pairs to send since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def drain_decisions(self) -> list[Decision]:
        """Return the decisions since the last call, which the launcher must carry out or show."""
        decisions, self._decisions = self._decisions, []
        return decisions

    # ---- events -------------------------------------------------------------------------------

    def on_host_joined(self, member: HostHello) -> str:
        """Handle that a host has connected. Returns why it cannot take part; empty if it can."""
        problem = self._find_problem(member)
        if problem:
            text = f"{member.host} cannot take part: {problem}."
            self._decisions.append(UserMessage(text=text))
            return problem
        self._connected[member.host] = _Host(member)
        if member.host not in self._hosts:
            self._hosts.append(member.host)
        return ""

    def on_host_ready(self, host: str, now: float) -> None:
        """Handle that a host runs no ranks and waits: at first, as requested, or after a failure.

        When a host leaves, the ranks of all hosts save and end by themselves, which is no failure.
        """
        host_state = self._connected[host]
        before, host_state.state = host_state.state, "ready"
        if before == "new":
            self._absent.discard(host)
            self._arrived_at = now
            if self._phase == "running":
                text = f"{host} joined; waiting for the next checkpoint."
                self._decisions.append(UserMessage(text=text))
        elif before == "running" and self._leavers:
            self._go_on_without(now, "; ".join(self._leavers))
        elif before == "running":
            self._has_failure = True
            # Its ranks may have ended because others did, on any host.
            is_last = self._limits.is_fixed and self._num_restarts >= self._limits.max_restarts
            self._gather(RANK_FAILED if is_last else f"a rank on {host} failed", now)
        if host_state.leaves:
            self._post(host, Shutdown(signum=signal.SIGTERM, text=""))
        self._start_if_complete(now)

    @property
    def will_continue(self) -> bool:
        """Whether another round follows if the ranks of this one save and exit now.

        So it is if a host will leave the job, or if they were told to end for another round.
        """
        will_leave = bool(self._leavers) and not self._limits.is_fixed
        return will_leave or (self._phase == "gathering" and self._number > 0)

    def on_host_leaving(self, host: str, why: str) -> None:
        """Handle that a host will leave: it is in no further round."""
        host_state = self._connected.get(host)
        if host_state is None or host_state.leaves:  # a rank of a lost host may have said so
            return
        host_state.leaves = why
        text = f"{host} leaves: {why}"
        self._decisions.append(UserMessage(text=f"{text}."))
        if host in self._members and self._phase == "running":
            self._leavers.append(text)

    def on_checkpoint_saved(self, step: int, now: float) -> None:
        """Handle a complete checkpoint: waiting hosts may join, and all continue from it."""
        if self._phase != "running":
            return
        room = self._limits.max_hosts - len(self._members)
        waiting = [name for name in self._hosts if self._is_waiting(name)][: max(0, room)]
        if waiting:
            self._gather(f"{' and '.join(waiting)} joined, and step {step} is saved", now)
            self._start_if_complete(now)

    def on_host_finished(self, host: str) -> None:
        """Handle that all ranks of a host have succeeded."""
        if self._connected[host].state != "running":  # it is to end them, and comes back
            return
        self._connected[host].state = "finished"
        left = [self._connected[name] for name in self._members if name in self._connected]
        if self._phase == "running" and all(host_state.state == "finished" for host_state in left):
            self._end("")

    def on_host_lost(self, host: str, why: str, now: float) -> None:
        """Handle the loss of a host with its ranks."""
        host_state = self._connected.pop(host, None)
        if host_state is None or self._phase == "over":
            return
        text = f"{host} left" if host_state.leaves else f"{host} was lost"
        details = f": {host_state.leaves or why}"
        self._decisions.append(HostLost(host=host, text=text + details))
        if host not in self._started:
            self._hosts.remove(host)
        has_gone = bool(host_state.leaves) and host_state.state == "ready"
        if host in self._members and host_state.state != "finished" and not has_gone:
            self._go_on_without(now, text, details)
        if self._phase == "gathering" and self._number == 0:
            self._absent.add(host)
        self._start_if_complete(now)

    def on_host_unreachable(self, host: str, now: float) -> None:
        """Handle a host that could not be reached: the first round need not wait for it."""
        if host not in self._connected:
            self._absent.add(host)
            self._start_if_complete(now)

    def stop(self, signum: int) -> None:
        """End the job for the user or the scheduler."""
        self._end("", signum)

    def tick(self, now: float) -> list[str]:
        """Enforce the limits. Returns the hosts to disconnect, which did not stop in time."""
        if self._phase != "gathering":
            return []
        late: list[str] = []
        stop_s = self._limits.grace_s + _STOP_MARGIN_S
        if now > self._since + stop_s:
            late = [
                name
                for name, host_state in self._connected.items()
                if host_state.state == "stopping"
            ]
            for name in late:
                self.on_host_lost(name, f"its ranks did not stop within {stop_s:g} s", now)
        self._start_if_complete(now)
        is_late = now > self._since + self._limits.join_timeout_s
        if self._phase == "gathering" and is_late and not self._is_stopping:
            self._end_for_lack_of_hosts()
        return late

    # ---- decisions ----------------------------------------------------------------------------

    def _find_problem(self, member: HostHello) -> str:
        """Return the reason why a host cannot take part; empty if it can."""
        if self._phase == "over":
            return "the job is over"
        own = self._own
        if own is None and member.host not in self._hosts:
            return f"the job's hosts are {', '.join(self._hosts)}"
        if own is not None and member.joins and member.command != own.command:
            return (
                f"{own.host} runs {own.command!r}, and {member.host} was given {member.command!r}. "
                "Give all hosts the same script and arguments; what differs between hosts can be "
                "in environment variables"
            )
        if self._limits.is_fixed and (member.node_rank or 0) >= self._limits.max_hosts:
            return f"--node-rank must be less than --nnodes {self._limits.max_hosts} there"
        # the launcher's own host may come later than others, and takes part
        members = dict.fromkeys([*self._started, *self._connected])
        if self._limits.is_fixed and member.joins and len(members) >= self._limits.max_hosts:
            return f"the job has its {self._limits.max_hosts} hosts: {', '.join(members)}"
        if member.joins and member.host in (*self._connected, own and own.host):
            return (
                f"a host named {member.host} takes part. Give each host a name of its own, by "
                "'hostname NAME'; if this is that host, join again in some seconds, when its old "
                "connection is lost"
            )
        if own is not None and member.joins and member.node_rank is not None:
            taken = {h.member.node_rank: name for name, h in self._connected.items()}
            taken[own.node_rank] = own.host
            if member.node_rank in taken:
                name = taken[member.node_rank]
                return f"{name} has --node-rank {member.node_rank}: give each host another one"
        others = {name: host_state.member.versions for name, host_state in self._connected.items()}
        differing = differences({**others, member.host: member.versions})
        return f"{differing}: install the same on all hosts" if differing else ""

    def _is_waiting(self, name: str) -> bool:
        found = self._connected.get(name)
        return found is not None and found.state == "ready" and not found.leaves

    def _place(self, name: str) -> float:
        """The place of a connected host in the order of ranks; those without a number come last."""
        number = self._connected[name].member.node_rank
        if number is None:
            return 0.0 if name in self._started else float("inf")
        return float(number)

    @property
    def _is_stopping(self) -> bool:
        return any(host_state.state == "stopping" for host_state in self._connected.values())

    def _go_on_without(self, now: float, why: str, details: str = "") -> None:
        """Have the other hosts gather, or end the job if their number is fixed."""
        if self._limits.is_fixed:
            self._end(why + details)
        else:
            self._has_loss = True
            self._gather(why, now)

    def _gather(self, why: str, now: float) -> None:
        """Have all hosts end their ranks and gather."""
        if self._phase == "over":
            return
        self._reasons.append(why)
        self._decisions.append(RoundEnding())
        if self._phase == "running":
            self._phase, self._since = "gathering", now
        for name, host_state in self._connected.items():
            if host_state.state in ("running", "finished"):
                host_state.state = "stopping"
                self._post(name, Restart())

    def _start_if_complete(self, now: float) -> None:
        """Start a round once no rank runs any more and enough hosts are ready."""
        if self._phase != "gathering" or self._is_stopping:
            return
        ready = sorted(filter(self._is_waiting, self._hosts), key=self._place)
        is_late = now > self._since + self._limits.join_timeout_s
        if self._number == 0 and not is_late and len(ready) < self._limits.max_hosts:
            awaited = [name for name in self._hosts if name not in self._absent]
            is_early = self._own is not None and now < self._arrived_at + _LAST_CALL_S
            if len(ready) < len(awaited) or is_early:
                return
        if len(ready) < self._limits.min_hosts:
            return
        if self._has_failure and not self._has_loss:
            if self._num_restarts >= self._limits.max_restarts:
                times = f", and all {self._limits.max_restarts} restarts are used up"
                self._end("; ".join(self._reasons) + times * bool(self._limits.max_restarts))
                return
            self._num_restarts += 1
        self._start(ready)

    def _start(self, ready: list[str]) -> None:
        chosen = [name for name in ready if name in self._members]
        chosen += [name for name in ready if name not in self._members]
        chosen = [name for name in ready if name in chosen[: self._limits.max_hosts]]
        self._number += 1
        self._members, self._phase = chosen, "running"
        message = Round(
            number=self._number,
            members=[self._described(name) for name in chosen],
            num_restarts=self._num_restarts,
            reason="; ".join(self._reasons),
        )
        for name in chosen:
            self._connected[name].state = "running"
            self._post(name, message)
        self._decisions.append(message)
        self._reasons, self._has_failure, self._has_loss = [], False, False
        self._leavers = []

    def _described(self, name: str) -> RoundMember:
        member = self._connected[name].member
        return RoundMember(host=name, slots=member.slots)

    def _end_for_lack_of_hosts(self) -> None:
        here = [name for name in self._hosts if name in self._connected]
        causes = f"{'; '.join(self._reasons)}; " if self._reasons else ""
        if self._limits.is_fixed:
            self._end(f"{causes}{self._describe_missing(here)}")
            return
        self._end(
            f"{causes}{counted(len(here), 'host')} joined ({', '.join(here) or 'none'}) within "
            f"{self._limits.join_timeout_s:g} s (--elastic MIN:MAX:SECONDS), but at least "
            f"{self._limits.min_hosts} are needed"
        )

    def _describe_missing(self, here: list[str]) -> str:
        """Describe which of a fixed number of hosts have not joined in time."""
        num = self._limits.max_hosts
        numbers = {self._connected[name].member.node_rank for name in here}
        missing = [f"--node-rank {i}" for i in range(num) if i not in numbers]
        absent = f"; {' and '.join(missing)} did not" if None not in numbers else ""
        return (
            f"{len(here)} of {num} hosts joined ({', '.join(here) or 'none'}) within "
            f"{self._limits.join_timeout_s:g} s{absent}. Start the command on each host, and let "
            "firewalls pass the network between them"
        )

    def _end(self, text: str, signum: int = signal.SIGTERM) -> None:
        if self._phase == "over":
            return
        self._phase = "over"
        for name in self._connected:
            self._post(name, Shutdown(signum=signum, text=text))
        self._decisions.append(JobEnded(text=text))

    def _post(self, host: str, message: Message) -> None:
        self._messages.append((host, message))
