"""Runs the script of one rank: starts it, forwards its output and signals, and reports its end.

A signal may reach the agent from the supervisor and from the system as well: the script gets it
once. `_SAVING_SIGNALS` announce the end of the job, and the script may save and exit by itself.

The output is also written to a file. No process that the script starts outlives the script, and the
script outlives neither its agent nor the supervisor.
"""

import json
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from torchmn.base.errors import shell_code
from torchmn.base.private_files import write_whole
from torchmn.cluster.cpus import count_memory_kills, describe_sigkill
from torchmn.cluster.environment_variables import MONITOR_VARIABLE, RECORD_VARIABLE
from torchmn.control.connection import Channel
from torchmn.control.heartbeat import answer
from torchmn.control.messages import (
    AwaitsInput,
    EndedBy,
    Exit,
    Failed,
    ForwardSignal,
    HeartbeatRequest,
    Leaving,
    LogWarning,
    Message,
    PreemptionNotice,
    ScriptStarted,
    Shown,
    StartScript,
    StatusRequest,
    Terminate,
)
from torchmn.control.processes import (
    descendants,
    expects_signal,
    has_children,
    is_stopped,
    kill_descendants,
    kill_on_parent_death,
    reap_children,
    send,
    send_group,
    signal_name,
)
from torchmn.control.script_connection import ScriptLink
from torchmn.run.monitor.bootstrap import with_bootstrap
from torchmn.run.preemption_notice import NoticeWatcher
from torchmn.run.script_input import open_input
from torchmn.run.script_output import ScriptOutput

# How long processes that the script left may take to exit before they get SIGTERM.
_LEFTOVER_S = 1.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGHUP)
_SAVING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
HANDLED_SIGNALS = (*_ENDING_SIGNALS, *_SAVING_SIGNALS, signal.SIGCHLD)
# A signal that comes from the supervisor and from the system within this time is one signal.
_SAME_SIGNAL_S = 5.0
_HANDLER_PERIOD_S = 0.2

_Source = Literal["supervisor", "system"]


class Agent:
    """Runs the script of one rank until it and all processes that it started have exited.

    ``started`` makes the report of its start from its process; ``place`` is (local rank, number of
    ranks on this host).
    """

    def __init__(
        self,
        rank: int,
        order: StartScript,
        channel: Channel,
        wakeup: socket.socket,
        started: Callable[..., ScriptStarted],
        place: tuple[int, int] = (0, 1),
        *,
        input_path: str = "",
    ) -> None:
        self._rank = rank
        self._order = order
        self._channel = channel
        self._wakeup = wakeup
        self._started = started
        self._place = place
        self._input_path = input_path
        path = Path(order.log_dir) / f"rank{rank}.log"
        self._output = ScriptOutput(path, channel, order.wants_refreshes)
        self._script_pid = 0
        self._returncode: int | None = None
        self._memory_kills: int | None = None
        self._note = ""
        self._started_at = self._ended_at = 0.0
        self._ended_by: EndedBy = "itself"
        self._kill_at = math.inf
        self._is_leaving_in_time = False
        self._received: dict[int, tuple[_Source, float]] = {}
        self._held: set[int] = set()
        self._end_leftovers_at: float | None = None
        self._kill_leftovers_at = 0.0
        self._link = ScriptLink(self._on_report)
        self._notices: NoticeWatcher | None = None

    def run(self, env: Mapping[str, str]) -> int:
        """Run the script to its end, report how it ended, and return its exit code."""
        self._output.open_log()
        self._start(env)
        self._on_messages()  # those that came with the order: the socket has nothing more to read
        while (returncode := self._end()) is None:
            self._wait()
            self._enforce_deadlines()
        # Before the exit is reported: then the supervisor may close the connection.
        self._output.drain(self._wait_for_messages, is_urgent=self._must_leave)
        self._write_exit_file(returncode)
        self._channel.post(
            Exit(
                returncode=returncode,
                ended_at=self._ended_at,
                ended_by=self._ended_by,
                note=self._note,
            )
        )
        self._wait_for_disconnect()
        return shell_code(returncode)

    # ---- start --------------------------------------------------------------------------------

    def _start(self, env: Mapping[str, str]) -> None:
        self._started_at = time.time()
        self._memory_kills = count_memory_kills()
        command = with_bootstrap(self._order.argv)
        stdin = open_input(self._input_path)
        self._is_python = command != self._order.argv
        process = subprocess.Popen(
            command,
            cwd=self._order.cwd,
            env={
                RECORD_VARIABLE: os.path.abspath(self._order.log_dir),
                **env,
                MONITOR_VARIABLE: self._link.variable(),
            },
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            close_fds=False,  # PMI_FD of MPICH: a connection opened by the launcher
            # A process group of its own for `send_group`, which Ctrl-C does not reach.
            start_new_session=True,
            # Ctrl-C waits for the bootstrap: earlier it would print a traceback of Python's start.
            preexec_fn=kill_on_parent_death(blocked=[signal.SIGINT] if self._is_python else []),
        )
        if stdin != subprocess.DEVNULL:
            os.close(stdin)
        self._script_pid = process.pid
        # Its thread begins after the fork. One rank of a host is enough: all save if one must.
        if self._order.preemption and self._place[0] == 0:
            self._notices = NoticeWatcher(self._order.preemption)
        self._link.script_started(process.pid)
        process.returncode = 0  # this class reaps; without it Popen would warn
        if process.stdout is not None and process.stderr is not None:
            self._output.follow("out", process.stdout)
            self._output.follow("err", process.stderr)
        self._channel.post(self._started(pid=process.pid))

    # ---- the loop -----------------------------------------------------------------------------

    def _end(self) -> int | None:
        """Return the script's return code once it and its descendants have exited, else None."""
        # Orphans become children of this process, so without children there are no descendants.
        if self._returncode is not None and has_children() and descendants(os.getpid()):
            return None
        return self._returncode

    def _wait(self) -> None:
        """Wait for output, messages or signals, and process them."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ, self._on_signals)
            if self._link.is_open:
                selector.register(self._link, selectors.EVENT_READ, self._link.forward_messages)
            if self._channel.is_open:
                events = selectors.EVENT_READ
                if self._channel.pending_bytes:
                    events |= selectors.EVENT_WRITE
                selector.register(self._channel, events, self._on_messages)
            if self._notices is not None:
                selector.register(self._notices, selectors.EVENT_READ, self._on_notice)
            self._output.register(selector)
            for key, _ in selector.select(self._timeout_s()):
                key.data()

    def _timeout_s(self) -> float | None:
        if self._returncode is not None:
            return 0.02  # waiting for processes that the script has left
        # No event tells that the script has installed a handler: look again after a while.
        look_at = time.monotonic() + _HANDLER_PERIOD_S if self._held else None
        deadlines = (self._kill_at, self._link.reply_by, self._output.refresh_at, look_at)
        first = min(at for at in deadlines if at is not None)
        return None if math.isinf(first) else max(0.0, first - time.monotonic())

    def _on_signals(self) -> None:
        # Read before reaping: a child that exits after this makes the socket readable again.
        numbers = self._wakeup.recv(64)
        for pid, returncode in reap_children():
            if pid == self._script_pid:
                self._returncode = returncode
                if returncode == -signal.SIGKILL:
                    self._note = describe_sigkill(self._memory_kills)
                self._ended_at = time.time()
                self._link.forward_messages()  # its last messages, before its exit is reported
        for number in numbers:
            if number in _SAVING_SIGNALS:
                self._forward(number, "system")
            elif number in _ENDING_SIGNALS:
                self._terminate(number, "outside")

    def _on_notice(self) -> None:
        """Tell the script and the supervisor that this host will be preempted."""
        assert self._notices is not None  # noqa: S101 - it has called this
        text, problem = self._notices.read()
        if problem:
            self._channel.post(LogWarning(text=problem))
            return
        self._notices.close()
        self._notices = None
        notice = PreemptionNotice(text=text)
        self._link.post(notice)
        self._channel.post(notice)

    def _on_messages(self) -> None:
        self._channel.flush()
        for message in self._channel.collect():
            if isinstance(message, Terminate):
                # Also to the monitor thread of the script: Python runs no signal handler while the
                # main thread is blocked inside a collective.
                self._link.post(message)
                self._terminate(message.signum, "supervisor")
            elif isinstance(message, HeartbeatRequest):
                answer(self._channel, self._script_pid, sees_launcher=True, place=self._place)
            elif isinstance(message, StatusRequest):
                self._link.request_status(message)
            elif isinstance(message, ForwardSignal):
                self._forward(message.signum, "supervisor")
            elif isinstance(message, Shown):
                self._output.on_shown(message.num_bytes)
        if not self._channel.is_open:
            self._terminate(signal.SIGTERM, "outside")  # the supervisor is dead

    def _on_report(self, message: Message) -> None:
        """Forward a message of the script, and write what it has not printed to its log."""
        if isinstance(message, Failed) and not message.is_shown:
            self._output.write_to_log(message.whole)
        elif isinstance(message, Leaving):
            self._output.write_to_log(message.text)
        elif isinstance(message, AwaitsInput):
            self._output.on_prompt(message.begins)
        self._channel.post(message)

    # ---- the end ------------------------------------------------------------------------------

    def _terminate(self, signum: int, by: EndedBy) -> None:
        """Send a signal to the script, which must exit within the grace period of a failed job."""
        if self._returncode is not None:
            return
        if not self._must_leave:
            self._ended_by = by
        # A stopped process does not act on the signal before it is continued: do not wait for it.
        grace_s = 0.0 if is_stopped(self._script_pid) else self._order.grace_s
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
        self._is_leaving_in_time = False
        send_group(self._script_pid, signum)

    @property
    def _must_leave(self) -> bool:
        """Whether the script has been asked to exit."""
        return self._kill_at < math.inf or self._is_leaving_in_time

    def _forward(self, signum: int, source: _Source) -> None:
        """Send the script a signal from outside the job, once even if both sources report it."""
        now = time.monotonic()
        before, at = self._received.get(signum, (source, 0.0))
        self._received[signum] = source, now
        if self._returncode is not None or (before != source and now - at < _SAME_SIGNAL_S):
            return
        if signum != signal.SIGTERM:
            self._held.add(signum)
            self._send_held()
            return
        if not self._must_leave:
            self._ended_by = "supervisor" if source == "supervisor" else "outside"
            self._is_leaving_in_time = True
            self._kill_at = now + self._order.signal_grace_s
        # not to the children of a Python script, such as those that load its data
        (send if self._is_python else send_group)(self._script_pid, signum)

    def _send_held(self) -> None:
        """Send the held signals that the script handles by now; before, they would end it."""
        for signum in list(self._held):
            if expects_signal(self._script_pid, signum):
                self._held.discard(signum)
                send(self._script_pid, signum)

    def _enforce_deadlines(self) -> None:
        """Kill what has exceeded its deadline: the script, then processes that it left behind."""
        now = time.monotonic()
        self._link.reply_if_overdue()
        self._output.refresh()
        if self._returncode is None:
            self._send_held()
            if now >= self._kill_at:
                if self._is_leaving_in_time:
                    self._is_leaving_in_time = False
                    self._channel.post(LogWarning(text=self._late_text()))
                send_group(self._script_pid, signal.SIGKILL)
                kill_descendants(os.getpid())
                self._kill_at = now + 0.1
            return
        if self._end_leftovers_at is None:
            # the grace period of a script that was terminated is that of its children as well
            wait_s = 0.0 if self._must_leave else _LEFTOVER_S
            self._end_leftovers_at = now + wait_s
            self._kill_leftovers_at = self._end_leftovers_at + _LEFTOVER_S
        if now >= self._kill_leftovers_at:
            kill_descendants(os.getpid())
        elif now >= self._end_leftovers_at:
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGTERM)

    def _late_text(self) -> str:
        return (
            f"it had not exited {self._order.signal_grace_s:g} s after SIGTERM and is killed. "
            "Raise --grace if it takes longer to save"
        )

    def _wait_for_messages(self) -> None:
        """After the script has ended, wait up to 0.5 s for messages and process them."""
        with selectors.DefaultSelector() as selector:
            events = selectors.EVENT_READ
            if self._channel.pending_bytes:
                events |= selectors.EVENT_WRITE
            selector.register(self._channel, events)
            selector.select(0.5)
        self._on_messages()

    def _write_exit_file(self, returncode: int) -> None:
        """Write ``rank<r>.exit.json``: how the rank ended."""
        path = Path(self._order.log_dir) / f"rank{self._rank}.exit.json"
        record = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": self._script_pid,
            "exit_code": shell_code(returncode),
            "signal": signal_name(returncode),
            "ended_by": self._ended_by,
            "started_at": _moment(self._started_at),
            "ended_at": _moment(self._ended_at),
            "elapsed_s": round(self._ended_at - self._started_at, 3),
        }
        try:
            write_whole(path, json.dumps(record, indent=1).encode() + b"\n")
        except OSError as error:
            self._channel.post(LogWarning(text=f"cannot write {path}: {error}"))

    def _wait_for_disconnect(self) -> None:
        """Wait until the supervisor has read everything and closes the connection.

        It closes that of a rank that failed or saved late: mpirun, which kills the other ranks when
        it sees the exit status, must not see it before they have ended.
        """
        while self._channel.is_open:
            self._wait_for_messages()
        with suppress(OSError):
            self._channel.close()


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="milliseconds")
