"""The part of the monitor that runs in a rank's script: failures, hangs, and a prompt end.

Every script of a job has an agent beside it: its parent process under ``torchmn run``, else the
rank monitor that `torchmn.run.install_crash_handler` starts. `ScriptMonitor` is the script's
end of the connection to it. Its thread answers the agent while the main thread is blocked, reports
a collective that exceeds its time limit, and ends a process that is blocked in a collective which
the other ranks will never reach.

It is installed explicitly, by the launcher's bootstrap (`torchmn.run.monitor.bootstrap`) or by
`install_crash_handler`, and observes `torchmn.base.events`: making a communicator changes nothing
in the process.
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
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from torchmn.base import events
from torchmn.base.events import Collectives, Observer
from torchmn.cluster.environment_variables import MONITOR_VARIABLE
from torchmn.control.connection import Channel
from torchmn.control.messages import (
    AwaitsInput,
    CheckpointSaved,
    CollectiveStatus,
    Failed,
    Joined,
    Joining,
    Leaving,
    Message,
    Overdue,
    PreemptionNotice,
    StatusReply,
    StatusRequest,
    Terminate,
)
from torchmn.control.processes import resident_nbytes
from torchmn.control.script import (
    Hook,
    is_consequence,
    on_error,
    script_stack,
    show_exception,
    traceback_text,
    unprinted_text,
    whole_text,
)
from torchmn.control.terminal_input import awaits_input

_PERIOD_S = 0.2
_STUCK_S = 0.5
_TERMINATION_S = 10.0
"""Seconds that a rank that failed only because of others waits for the agent to end it."""
_MAX_CHARS = 16_000
_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))


class ScriptMonitor(Observer):
    """The script's connection to its agent. One per process, created in the main thread.

    ``has_log``: the agent writes a log of this rank, and the launcher shows how the job failed, so
    that the script need not print its last traceback.
    """

    ends_lost_ranks = True

    def __init__(self, connection: socket.socket, *, has_log: bool = False) -> None:
        self.has_log = has_log
        self._channel = Channel(connection)
        # A channel is not thread-safe, and all threads of the script may report something.
        self._lock = threading.Lock()
        # A forked child inherits this object and the socket, but must not report for the rank.
        self._pid = os.getpid()
        self._followed: list[weakref.ref[Collectives]] = []
        self._must_end = threading.Event()
        self._has_joined = False
        self._is_waiting = False
        self._fatal: BaseException | None = None  # the exception that ends this process
        self._has_reported_hang = False
        self._device_nbytes: int | None = None
        # A daemon: it reads until the process is gone, and the interpreter must not wait for it.
        threading.Thread(target=self._run, name="torchmn-monitor", daemon=True).start()

    def collectives(self, recorder: Collectives) -> None:
        """See `Observer.collectives`. Their time limits are checked from now on."""
        self._followed.append(weakref.ref(recorder))

    def collective(self, entry: object) -> None:
        """See `Observer.collective`."""
        self.look_for_hang()

    def joining(self, limit_s: float, begins: bool) -> None:
        """See `Observer.joining`. The launcher checks the limit: MPI joins with the GIL held."""
        if self._has_joined:
            return
        self._has_joined = not begins
        self._post(Joining(limit_s=limit_s) if begins else Joined())

    def failed(self, error: BaseException) -> None:
        """See `Observer.failed`."""
        self.report(error)

    def memory(self, device_nbytes: int) -> None:
        """See `Observer.memory`. torch is not asked here: its allocator may be what hangs."""
        self._device_nbytes = device_nbytes

    def note_fatal(self, error: BaseException) -> None:
        """Report this exception, not the current stack, in status replies from now on. Local."""
        self._fatal = error

    def script_failed(self, error: BaseException, hook: Hook | None, text: str = "") -> None:
        """Report an exception that ends this process, and print it unless the launcher does.

        ``hook`` prints it, or None if ``text`` is to be printed in place of its traceback. If the
        exception only follows from the failure of another rank, it is not printed and this waits
        until the agent ends the process, so that the launcher shows the cause alone. Where MPI is
        in use the process ends here: `MPI_Finalize` at exit would wait for the other ranks.
        """
        if os.getpid() != self._pid:
            show_exception(error, hook, text)
            return
        self._fatal = error
        follows = is_consequence(error)
        unprinted = unprinted_text(error, hook) if self.has_log else ""
        try:
            if not (follows or unprinted):
                show_exception(error, hook, text)
        finally:  # whatever a hook of the script does
            if follows:
                self.look_for_hang()
            whole = unprinted or whole_text(error)[-_MAX_CHARS:]
            self.report(error, text, whole=whole, is_shown=not unprinted)
        if follows:
            self._is_waiting = True
            if not self._must_end.wait(_TERMINATION_S):
                show_exception(error, hook, text)
        if _is_mpi_in_use():
            _end_now(1)

    def report(
        self, error: BaseException, text: str = "", *, whole: str = "", is_shown: bool = True
    ) -> None:
        """Report an exception after which the job cannot continue. From any thread.

        ``whole`` and ``is_shown`` are those of `Failed`.
        """
        if os.getpid() != self._pid:
            return
        self._post(
            Failed(
                status=1,
                traceback=text or traceback_text(error)[-_MAX_CHARS:],
                error=text or "".join(traceback.format_exception_only(error)),
                is_consequence=is_consequence(error),
                at=time.time(),
                whole=whole,
                is_shown=is_shown,
            )
        )

    def checkpoint_saved(self, step: int) -> None:
        """Report that all ranks have finished a checkpoint. From any thread."""
        if os.getpid() == self._pid:
            self._post(CheckpointSaved(step=step))

    def awaits_input(self, begins: bool) -> None:
        """Report that the script begins, or has ended, to wait for a person at the terminal."""
        if os.getpid() == self._pid:
            self._post(AwaitsInput(begins=begins))

    def script_exits(self, status: int, text: str = "") -> None:
        """Report that the script has reached its end and asks for this exit status.

        ``text`` is what was left out of its output, as in `Leaving`.
        """
        if os.getpid() == self._pid:
            self._post(Leaving(status=0 if self._fatal is not None else status, text=text))

    def look_for_hang(self) -> None:
        """Report a collective that has exceeded its time limit, once. From any thread."""
        if self._has_reported_hang:
            return
        for recorder in self._alive():
            overdue = recorder.overdue()
            if overdue is not None:
                self._has_reported_hang = True
                self._post(
                    Overdue(group=overdue.group, number=overdue.in_group, limit_s=overdue.limit_s)
                )
                return

    def num_collectives(self) -> int:
        """Return the number of collectives that this process has started."""
        return sum(each.number for each in self._collectives())

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        stuck_since: float | None = None
        while self._channel.is_open:
            poll.poll(1000 * _PERIOD_S)
            with self._lock:
                self._channel.flush()
                messages = self._channel.collect()
            # Without the lock, which `_post` takes: other threads may report meanwhile.
            for message in messages:
                if isinstance(message, StatusRequest):
                    self._post(self._status(message.num_recent))
                elif isinstance(message, PreemptionNotice):
                    self.notice = message.text
                elif isinstance(message, Terminate):
                    self._must_end.set()
            self.look_for_hang()
            # The agent sends a signal too. If the script has a handler for it, that runs unless the
            # main thread is blocked: only then does this thread end the process.
            if self._must_end.is_set():
                if not self._is_stuck():
                    stuck_since = None
                elif stuck_since is None:
                    stuck_since = time.monotonic()
                elif time.monotonic() - stuck_since > _STUCK_S:
                    _end_now(1)

    def _status(self, num_recent: int) -> StatusReply:
        """Describe what this process does, with the last collectives of each communicator."""
        fatal = self._fatal
        of_script = traceback_text(fatal) if fatal else script_stack(threading.main_thread())
        recent = [each for own in self._alive() for each in own.recent(num_recent) if num_recent]
        engines = [each for own in self._alive() if (each := own.engine_status()) is not None]
        return StatusReply(
            collectives=tuple(self._collectives()),
            recent=tuple(sorted(recent, key=lambda each: -each.age_s)[-num_recent:]),
            engines=tuple(engines),
            rss_nbytes=resident_nbytes(os.getpid()),
            device_nbytes=self._device_nbytes,
            awaits_input=awaits_input(),
            stacks=whole_text(fatal)[-_MAX_CHARS:] if fatal else _stacks(),
            script_stack=of_script[-_MAX_CHARS:],
        )

    def _is_stuck(self) -> bool:
        """Whether this process waits for ranks that will not arrive."""
        return self._is_waiting or any(each.state == "running" for each in self._collectives())

    def _collectives(self) -> list[CollectiveStatus]:
        return [each for recorder in self._alive() for each in recorder.describe()]

    def _alive(self) -> Iterator[Collectives]:
        for reference in list(self._followed):
            recorder = reference()
            if recorder is None:
                with suppress(ValueError):  # another thread has removed it
                    self._followed.remove(reference)
            else:
                yield recorder

    def _post(self, message: Message) -> None:
        with self._lock:
            self._channel.post(message)


def current() -> ScriptMonitor | None:
    """Return the monitor of this process, None if none has been installed."""
    return next((each for each in events.observers if isinstance(each, ScriptMonitor)), None)


def install(connection: socket.socket, *, has_log: bool = False) -> ScriptMonitor:
    """Install the monitor of this process: start its thread, and enable `faulthandler`.

    ``connection`` leads to the agent; ``has_log`` is that of `ScriptMonitor`.
    """
    # Programs that the script starts would keep the connection open after its end.
    connection.set_inheritable(False)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    monitor = ScriptMonitor(connection, has_log=has_log)
    on_error(lambda error, text: monitor.script_failed(error, None, text))  # by `run_main`
    events.add(monitor)
    return monitor


def install_from_environment(environ: MutableMapping[str, str]) -> ScriptMonitor | None:
    """Install the monitor with the connection that the agent has left in `MONITOR_VARIABLE`.

    The variable is removed, so that no child process tries to use the connection. Returns ``None``
    if it is not set, or does not name a connection that this process has inherited.
    """
    descriptor, _, agent = environ.pop(MONITOR_VARIABLE, "").partition(":")
    if not (descriptor.isdigit() and agent.isdigit()):
        return None
    try:
        connection = socket.socket(fileno=int(descriptor))
    except OSError:  # a program between the agent and this one has closed it
        return None
    if _maker_of(connection) != int(agent):  # and has opened another one
        connection.detach()
        return None
    return install(connection, has_log=True)


def install_exit_hooks(monitor: ScriptMonitor) -> None:
    """Have ``monitor`` report how a process ends that the bootstrap did not start.

    Replaces `sys.excepthook` and `sys.exit` and registers a function with `atexit`, which sees an
    exit status only if it was given to `sys.exit`. An exit that the script catches, after which it
    starts another collective, does not count. Call it after the transports have been made: what
    they do at exit may be to wait for the other ranks.
    """
    show, plain_exit = sys.excepthook, sys.exit
    request = (0, -1)  # the last status given to sys.exit, and the number of collectives then

    def report_exception(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        monitor.note_fatal(error)
        if isinstance(error, KeyboardInterrupt):
            show_exception(error, show)
        else:
            monitor.script_failed(error, show)

    def exit_with_note(code: Any = None, /) -> NoReturn:
        nonlocal request
        # In any other thread `sys.exit` ends that thread alone.
        if threading.current_thread() is threading.main_thread():
            request = status_of(code), monitor.num_collectives()
        plain_exit(code)

    def report_exit() -> None:
        status, num_collectives = request
        monitor.script_exits(status if num_collectives == monitor.num_collectives() else 0)

    sys.excepthook, sys.exit = report_exception, exit_with_note
    atexit.register(report_exit)


def status_of(code: object) -> int:
    """Return the exit status for an argument of `sys.exit`."""
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def _maker_of(connection: socket.socket) -> int:
    """Return the process id of the process that created a pair of sockets."""
    size = struct.calcsize("3i")
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", packed)[0])


def _is_mpi_in_use() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and not mpi.Is_finalized()


def _end_now(status: int) -> NoReturn:
    """End the process from any thread. Output is flushed; nothing else is cleaned up."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)


def _stacks() -> str:
    """Format the stacks of all threads but this one, beginning with the main thread."""
    own = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    main = threading.main_thread().ident
    parts = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        if ident != own:
            stack = [f for f in traceback.extract_stack(frames[ident]) if f.filename != _BOOTSTRAP]
            parts.append(f"{names.get(ident, 'thread')}:\n{''.join(traceback.format_list(stack))}")
    return "\n".join(part.rstrip() for part in parts)[:_MAX_CHARS]
