"""How long a rank waits for other ranks, and how it finds out what they are doing.

A rank that has waited for ``unreachable_s`` in a collective asks all other ranks for their status,
over separate connections, and asks again each time half of that has passed. Before that, after 5 s,
10 s, 20 s and so on, it asks whether a rank has ended. The status decides whether it continues to
wait:

| status of the rank that is missing | how it is known | result |
|---|---|---|
| computes outside of collectives | it answers with the line of its script | one warning that says who waits for whom; an error after ``busy_s`` |
| does not answer, because C code holds its interpreter | its process on this host is not stopped; on another host its monitor has not ended the job | the same |
| waits in another collective | it answers | an error once all of those ranks have waited for ``unreachable_s`` |
| is in this collective as well | it answers | the same: the network may be slow or interrupted |
| waits for a person at the terminal, as in pdb | it answers so | the time does not count |
| has reached the end of its script | it answers so, or its process on this host has ended | an error after 5 s |
| has closed the communicator, or has ended on another host | it refuses the connection | an error after ``unreachable_s`` |
| is stopped by a signal | the state of its process on this host; on another host it does not answer | an error after ``unreachable_s`` |
| cannot be reached | it does not answer | an error after ``unreachable_s`` |

If the missing rank itself waits for a third rank, the third rank counts. The monitors of
``torchmn run`` and `install_crash_handler` end a job in which a process is stopped or a host is
lost, so under them a rank on another host may be silent. A dedicated thread of each rank answers.
"""  # noqa: E501 - a table

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torchmn.base import events
from torchmn.base.errors import LaunchError, UsageError
from torchmn.base.log import Log
from torchmn.cluster.environment_variables import INPUT_RANK_VARIABLE
from torchmn.comm.flight_recorder import CollectiveRecord, FlightRecorder
from torchmn.comm.transports.base import TimeLimit, Transport, abort_pending_receives
from torchmn.control.authenticated_listener import AuthenticatedListener, connect
from torchmn.control.hang_report import DONE, EARLY_END, HangReport, RankStatus, report
from torchmn.control.messages import Overdue, StatusReply, decode, encode
from torchmn.control.processes import is_running, is_stopped
from torchmn.control.rank_listener import RankAddress, listen_for_ranks
from torchmn.control.script import script_stack
from torchmn.control.terminal_input import PERSON_S, awaits_input

_ROLE = "status of a rank"
_FIRST_S = 5.0
_ANSWER_S = 5.0
"""How long a rank may take to answer: its thread needs a core and the interpreter."""
_NUM_ASKED_AT_ONCE = 16
_PERIOD_S = 0.5


@dataclass(frozen=True)
class Timeout:
    """How long a rank waits in a collective for the others, in seconds.

    Args:
        unreachable_s: limit for a rank that is stopped, waits in another collective, has ended or
            cannot be reached.
        busy_s: limit for a rank that computes by itself, such as rank 0 in an evaluation. After
            ``unreachable_s`` a warning says who waits for whom.
        first_s: replaces ``unreachable_s`` until the first exchange of gradients has ended, while
            ranks still read data or compile at different speeds. Default: 5 times
            ``unreachable_s``.

    Raises UsageError: not 0 < ``unreachable_s`` <= ``busy_s`` < infinity, or ``first_s`` is not a
    positive, finite number.

    Example:
        >>> comm = torchmn.create_communicator(timeout_s=torchmn.Timeout(busy_s=3600))
    """

    unreachable_s: float = 60.0
    busy_s: float = 600.0
    first_s: float | None = None

    def __post_init__(self) -> None:
        if self.first_s is not None and not 0 < self.first_s < float("inf"):
            raise UsageError(f"{self}: first_s must be a positive, finite number of seconds.")
        if not 0 < self.unreachable_s <= self.busy_s < float("inf"):
            raise UsageError(
                f"{self}: both must be positive, finite numbers of seconds, and busy_s not less "
                "than unreachable_s."
            )


@dataclass(eq=False, slots=True)
class Wait:
    """One wait of this rank: its time limit, and when to ask the other ranks for their status."""

    limit: TimeLimit
    transport: Transport
    ask_s: float
    began_s: float
    has_warned: bool = False
    ask_at_s: float = field(init=False)
    report: HangReport | None = None  # once the other ranks have been asked

    def __post_init__(self) -> None:
        self.ask_at_s = self.began_s + min(self.ask_s, _FIRST_S)

    @property
    def reason(self) -> str:
        """What is not over within the limit, and the cause; empty if it is not known."""
        if self.report is None:
            return ""
        return f"{replace(self.report, limit_s=self.limit.seconds).summary}."

    def restart(self) -> None:
        """Start the wait again, from now."""
        self.limit.restart()
        self.began_s = time.monotonic()
        self.__post_init__()


class PeerStatus:
    """Reports the status of this rank, and asks other ranks for theirs during a long wait. Local.

    ``addresses`` are the addresses of this host to listen at. ``busy_s``: see `Timeout`.
    ``longest_s`` is what transports get as their limit. Where a rank has a terminal it is longer:
    gloo keeps the limit with which a wait began, and a person may take any time there.
    """

    def __init__(self, addresses: Sequence[str], busy_s: float) -> None:
        self.busy_s = busy_s
        self.longest_s = PERSON_S if INPUT_RANK_VARIABLE in os.environ else busy_s
        self._listener, self.address = listen_for_ranks(addresses, _ROLE)
        self._owner = threading.current_thread()
        self._peers: Mapping[int, RankAddress] = {}
        self._hosts: Mapping[int, str] = {}
        self._rank = 0
        self._has_closed, self._wake = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._asking: threading.Thread | None = None

    def start(self, rank: int, peers: Mapping[int, RankAddress], hosts: Mapping[int, str]) -> None:
        """Start to answer, and to ask ``peers``. ``hosts`` has the host name of every rank."""
        self._rank, self._peers, self._hosts = rank, peers, hosts
        # A weak reference, so that a communicator that was never finalized can be collected: the
        # thread ends when it is gone.
        arguments = (weakref.ref(self), self._listener, self._has_closed)
        self._thread = threading.Thread(
            target=_serve, args=arguments, name="torchmn-status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering and asking."""
        self._wake.close()  # the thread polls the other end, which becomes readable
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ANSWER_S)  # it may be answering

    def status(self) -> StatusReply:
        """The current status of this rank. May be called from any thread."""
        collectives = [
            each for recorder in FlightRecorder.made_in(self._owner) for each in recorder.describe()
        ]
        main = threading.main_thread()
        return StatusReply(
            collectives=tuple(collectives),
            script_stack=script_stack(self._owner),
            has_ended=self._owner is main and not main.is_alive(),
            awaits_input=awaits_input(),
        )

    def look(self) -> None:
        """Start to ask the other ranks if a collective takes long and no request is under way."""
        if self._asking is not None and self._asking.is_alive():
            return
        now = time.monotonic()
        for recorder in FlightRecorder.made_in(self._owner):
            for entry in recorder.running():
                if entry.wait is not None and now >= entry.wait.ask_at_s:
                    # On another thread, because this one must keep answering the other ranks.
                    arguments = (entry, entry.wait)
                    self._asking = threading.Thread(target=self._ask, args=arguments, daemon=True)
                    self._asking.start()
                    return

    def _ask(self, entry: CollectiveRecord, wait: Wait) -> None:
        # Several at once, because a rank that does not answer takes `_ANSWER_S`.
        with ThreadPoolExecutor(_NUM_ASKED_AT_ONCE) as threads:
            found = dict(zip(self._peers, threads.map(self._status_of, self._peers), strict=True))
        found[self._rank] = RankStatus.of(self.status())
        waited_s = round(time.monotonic() - wait.began_s, 1)
        limit_s = min(waited_s, wait.ask_s)
        overdue = Overdue(group=entry.group, number=entry.in_group, limit_s=limit_s)
        about = report(overdue, self._rank, found, self._hosts)
        waiting = {
            rank: min(ages)
            for rank, status in found.items()
            if (ages := [own.age_s for own in status.collectives if own.state != DONE])
        }
        if entry.state != "running" or not waiting:  # it has ended while the others were asked
            return
        wait.report = about
        if any(found[rank].has_ended for rank in about.missing):
            self._end(entry, wait, waited_s)
            return
        if any(status.awaits_input for status in found.values()):
            wait.restart()  # the time that a person takes at the terminal does not count
            return
        if waited_s < wait.ask_s:
            wait.ask_at_s = wait.began_s + min(wait.ask_s, 2 * waited_s)
            return
        wait.ask_at_s = time.monotonic() + wait.ask_s / 2
        longest_s = max(wait.ask_s, self.busy_s)
        if about.missing and not any(found[rank].is_halted for rank in about.missing):
            if waited_s >= longest_s:
                self._end(entry, wait, longest_s)
                return
            # Of all ranks that wait only the lowest one warns.
            if not wait.has_warned and self._rank == min(waiting):
                log = Log(__name__, rank=self._rank, size=len(found), host=self._hosts[self._rank])
                log.warning("%s", _warning(about.summary, longest_s))
            wait.has_warned = True
        elif about.missing or min(waiting.values()) >= wait.ask_s:
            self._end(entry, wait, wait.ask_s)

    def _end(self, entry: CollectiveRecord, wait: Wait, limit_s: float) -> None:
        entry.limit_s = wait.limit.seconds = limit_s
        # The first ends a wait that polls its limit; gloo blocks in C++ with the limit that it was
        # given, and only the second ends that.
        wait.limit.end()
        abort_pending_receives(wait.transport)

    def _status_of(self, rank: int) -> RankStatus:
        """The status that another rank replies, or what is known about it if it does not reply."""
        peer, is_here = self._peers[rank], self._hosts[rank] == self._hosts[self._rank]
        was_refused = False
        for host in peer.hosts:
            try:
                return RankStatus.of(_answer_of(f"{host}:{peer.port}", peer.secret))
            except LaunchError as error:
                # Refused means that the host is up and that nothing listens there any more.
                was_refused |= isinstance(error.__context__, ConnectionRefusedError)
            except (OSError, ValueError):
                continue
        if is_here and is_stopped(peer.pid):
            return RankStatus(text="is stopped by a signal", is_halted=True)
        if is_here and not is_running(peer.pid):
            return RankStatus(text=f"has ended ({EARLY_END})", is_halted=True, has_ended=True)
        if was_refused:
            return RankStatus(text="has ended, or closed its communicator", is_halted=True)
        # A silent process that is neither stopped nor gone may hold the interpreter in C code. On
        # other hosts only a monitor can know that, and it would have ended the job otherwise.
        is_alive = is_here or any(each.ends_lost_ranks for each in events.observers)
        return RankStatus(text="does not answer", is_halted=not is_alive)


def _serve(
    found: weakref.ref[PeerStatus], listener: AuthenticatedListener, has_closed: socket.socket
) -> None:
    """The main function of a `PeerStatus` thread, which holds only a weak reference to it."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(has_closed, select.POLLIN)
    while has_closed.fileno() not in dict(poll.poll(_PERIOD_S * 1e3)):
        peers = found()
        if peers is None:
            break
        for connection, _ in listener.accept():
            with connection, suppress(OSError):
                connection.settimeout(_ANSWER_S)
                connection.sendall(encode(peers.status()))
        peers.look()
        del peers  # while the thread polls, this variable would keep it alive
    listener.close()
    has_closed.close()


def _answer_of(address: str, secret: str) -> StatusReply:
    """The reply of a rank. Raises LaunchError, OSError or ValueError: none, or not a valid one."""
    text = b""
    with connect(
        address, secret=secret, role=_ROLE, line=b"?\n", limit_s=_ANSWER_S, retries=False
    ) as connection:
        connection.settimeout(_ANSWER_S)
        while chunk := connection.recv(1 << 16):
            text += chunk
    answer = decode(text)
    if not isinstance(answer, StatusReply):
        raise ValueError(f"{type(answer).__name__} is no answer")
    return answer


def _warning(summary: str, longest_s: float) -> str:
    return (
        f"{summary}. It is alive, so it is waited for, up to {longest_s:g} s in all; then "
        "the job ends. If its work may take longer: "
        "create_communicator(timeout_s=torchmn.Timeout(busy_s=...))."
    )
