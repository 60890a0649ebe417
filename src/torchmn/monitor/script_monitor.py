"""The script's side of the watch over a job: last words, signs of a hang, and a prompt end.

An agent stands beside every script: its parent under ``torchmn run``, else the sentinel that
`torchmn.resilience.install_crash_handler` starts. A thread here answers the agent's questions when
the main thread is stuck, tells it of a collective that takes too long, and ends the process where
nothing else would: in a collective that others will never come to. Nothing happens without an
agent.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import select
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn, Protocol

from torchmn import errors
from torchmn.control.connection import Channel
from torchmn.control.messages import (
    Failed,
    Joined,
    Joining,
    Leaving,
    Message,
    Overdue,
    StatusReply,
    StatusRequest,
    Terminate,
)
from torchmn.errors import CommunicationError
from torchmn.script import before_exit

WATCH_VARIABLE = "TORCHMN_WATCH"
"""``descriptor:process`` of the connection to the agent, which the script inherits."""
_PERIOD_S = 0.2
_STUCK_S = 0.5
_VERDICT_S = 10.0
"""How long a rank that failed only because of others waits for the word of the agent."""
_WORDS = 16_000
_PEERS_FAULT = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout")


class OverdueCollective(Protocol):
    """A collective that takes too long."""

    group: str
    in_group: int
    limit_s: float


class Collectives(Protocol):
    """The collectives of one communicator, read from another thread."""

    def overdue(self) -> OverdueCollective | None:
        """One that has not completed in time."""

    def describe(self) -> list[dict[str, object]]:
        """The newest of each group: group, ranks, number, what, where, state, age_s."""


class ScriptMonitor:
    """This process as its agent sees it. Made once, in the main thread, by `of_this_process`."""

    def __init__(self, connection: socket.socket) -> None:
        self._channel = Channel(connection)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._followed: list[weakref.ref[Collectives]] = []
        self._must_end = threading.Event()
        self._has_joined = False
        self._is_waiting = False
        self._fatal: BaseException | None = None  # what ends this process
        self._has_told_of_hang = False
        self._exit_note: tuple[int, int] | None = None

    def start(self) -> None:
        """Watch, and be asked before the interpreter ends."""
        if not faulthandler.is_enabled():
            faulthandler.enable()
        previous = sys.excepthook

        def on_exception(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self._fatal = error  # shown in place of the stack of this hook
            previous(kind, error, trace)
            if not isinstance(error, KeyboardInterrupt):
                self.fail(error)

        sys.excepthook = on_exception
        before_exit(self.fail)
        self._note_exits()
        atexit.register(self._leave)
        threading.Thread(target=self._watch, name="torchmn-watch", daemon=True).start()

    def follow(self, collectives: Collectives) -> None:
        """Look after the collectives of a communicator as long as it lives."""
        self._followed.append(weakref.ref(collectives))
        # Called before what transports do at exit, which may be to wait for the others.
        atexit.unregister(self._leave)
        atexit.register(self._leave)

    def join(self, limit_s: float) -> None:
        """Tell that this process joins the others now. It may hold Python's lock meanwhile."""
        if not self._has_joined:
            self._post(Joining(limit_s=limit_s))

    def has_joined(self) -> None:
        """Tell that all have come."""
        if not self._has_joined:
            self._has_joined = True
            self._post(Joined())

    def fail(self, error: BaseException) -> None:
        """Tell the last words of an exception that ends this process.

        One that only follows from another rank's end waits for the agent's verdict, so that the
        true cause is found first. Where MPI is in use the process ends here: at exit
        `MPI_Finalize` would wait for the others.
        """
        if os.getpid() != self._pid:
            return
        follows = is_consequence(error)
        self._fatal = error
        if follows:
            self.look_for_hang()
        words = _words_of(error)
        self._post(Failed(status=1, words=words, is_consequence=follows, at=time.time()))
        if follows:
            self._is_waiting = True
            self._must_end.wait(_VERDICT_S)
        if _is_mpi_in_use():
            _end_now(1)

    # ---- the thread ----

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        stuck_since: float | None = None
        while self._channel.is_open:
            poll.poll(1000 * _PERIOD_S)
            with self._lock:
                self._channel.flush()
                messages = self._channel.collect()
            for message in messages:
                if isinstance(message, StatusRequest):
                    stacks = _words_of(self._fatal) if self._fatal else _stacks()
                    self._post(StatusReply(collectives=self._collectives(), stacks=stacks))
                elif isinstance(message, Terminate):
                    self._must_end.set()
            self.look_for_hang()
            if self._must_end.is_set():
                if not self._is_stuck():
                    stuck_since = None
                elif stuck_since is None:
                    stuck_since = time.monotonic()
                elif time.monotonic() - stuck_since > _STUCK_S:
                    _end_now(1)

    def look_for_hang(self) -> None:
        """Tell of a collective that has passed its limit, once. From any thread."""
        if self._has_told_of_hang:
            return
        for collectives in self._alive():
            overdue = collectives.overdue()
            if overdue is not None:
                self._has_told_of_hang = True
                self._post(
                    Overdue(group=overdue.group, number=overdue.in_group, limit_s=overdue.limit_s)
                )
                return

    def _is_stuck(self) -> bool:
        """Whether the main thread waits for others, who will not come."""
        return self._is_waiting or any(told["state"] == "running" for told in self._collectives())

    def _collectives(self) -> list[dict[str, object]]:
        return [told for collectives in self._alive() for told in collectives.describe()]

    def _alive(self) -> Iterator[Collectives]:
        for reference in list(self._followed):
            collectives = reference()
            if collectives is None:
                with suppress(ValueError):  # another thread was here before
                    self._followed.remove(reference)
            else:
                yield collectives

    def _post(self, message: Message) -> None:
        with self._lock:
            self._channel.post(message)

    # ---- exits ----

    def _note_exits(self) -> None:
        """Remember the status that `sys.exit` was called with: at exit nothing else tells it."""
        plain_exit: Callable[..., NoReturn] = sys.exit

        def exit_with_note(status: Any = None, /) -> NoReturn:
            if os.getpid() == self._pid and threading.current_thread() is threading.main_thread():
                code = status if isinstance(status, int) else int(status is not None)
                self._exit_note = (code & 0xFF, self._num_collectives())
            plain_exit(status)

        sys.exit = exit_with_note

    def _leave(self) -> None:
        """At exit: an exit that was caught, after which training went on, does not count."""
        if os.getpid() != self._pid:
            return
        status, num_then = self._exit_note or (0, -1)
        is_current = num_then == self._num_collectives()
        self._post(Leaving(status=status if is_current else 0))

    def _num_collectives(self) -> int:
        return sum(int(str(told["number"])) for told in self._collectives())


_watched: list[ScriptMonitor] = []
"""At most one: a process ends only once."""


def of_this_process() -> ScriptMonitor | None:
    """What watches this process; ``None`` where no agent has left a connection to itself."""
    if _watched:
        return _watched[0]
    descriptor, _, agent = os.environ.pop(WATCH_VARIABLE, "").partition(":")
    if not (descriptor.isdigit() and agent.isdigit()):
        return None
    try:
        connection = socket.socket(fileno=int(descriptor))
    except OSError:  # a program between the agent and us has closed it
        return None
    if _maker_of(connection) not in (None, int(agent)):  # and has opened another one
        connection.detach()
        return None
    return watch_over(connection)


def _maker_of(connection: socket.socket) -> int | None:
    """The process that made a pair of sockets, where the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    size = struct.calcsize("3i")
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", packed)[0])


def watch_over(connection: socket.socket) -> ScriptMonitor:
    """Begin to be watched by whoever is at the other end."""
    connection.set_inheritable(False)
    watched = ScriptMonitor(connection)
    watched.start()
    _watched.append(watched)
    return watched


def follow(collectives: Collectives) -> None:
    """Look after the collectives of a communicator, where this process is watched."""
    watched = of_this_process()
    if watched is not None:
        watched.follow(collectives)


def look_for_hang() -> None:
    """Tell of a collective that has passed its limit, where this process is watched."""
    watched = of_this_process()
    if watched is not None:
        watched.look_for_hang()


@contextmanager
def joining(limit_s: float) -> Iterator[None]:
    """Around what joins all ranks: that of this one, and how long it may take, is told."""
    watched = of_this_process()
    if watched is not None:
        watched.join(limit_s)
    yield
    if watched is not None:
        watched.has_joined()


def is_consequence(error: BaseException) -> bool:
    """Whether it says no more than that other ranks have ended or do not answer."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, errors.RankMismatchError):
            return False
        if isinstance(current, CommunicationError) or _is_of_an_engine(current):
            return True
        current = current.__cause__ or current.__context__
    return False


def _words_of(error: BaseException) -> str:
    words = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return words[-_WORDS:]


def _is_of_an_engine(error: BaseException) -> bool:
    """Whether gloo, NCCL or MPI says so: for scripts that use them beside us."""
    module, name = type(error).__module__, type(error).__name__
    if module.startswith("mpi4py"):
        return True
    is_distributed = name in ("DistBackendError", "DistNetworkError", "DistStoreError")
    text = str(error).lower()
    return (is_distributed or "gloo" in text) and any(word in text for word in _PEERS_FAULT)


def _is_mpi_in_use() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and not mpi.Is_finalized()


def _end_now(status: int) -> NoReturn:
    """End the process from any thread, with all that was printed and nothing else."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)


def _stacks() -> str:
    """The stacks of all threads but this one, the main thread's first."""
    own = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    main = threading.main_thread().ident
    parts = [
        f"{names.get(ident, 'thread')}:\n" + "".join(traceback.format_stack(frames[ident])).rstrip()
        for ident in sorted(frames, key=lambda ident: ident != main)
        if ident != own
    ]
    return "\n".join(parts)[:_WORDS]
