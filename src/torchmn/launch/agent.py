"""Runs the script of one rank: starts it, forwards its output and signals, and reports its end.

The output is also written to a file. No process that the script starts outlives the script, and the
script outlives neither its agent nor the supervisor.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from torchmn.control.connection import Channel
from torchmn.control.messages.job import (
    EndedBy,
    Exit,
    ForwardSignal,
    LogWarning,
    Output,
    Refresh,
    ScriptStarted,
    StartScript,
    Stream,
    Terminate,
)
from torchmn.control.messages.monitor import StatusRequest
from torchmn.control.private_files import make_private_folder, open_private
from torchmn.control.processes import (
    descendants,
    is_stopped,
    kill_descendants,
    kill_on_parent_death,
    reap_children,
    send,
    send_group,
    signal_name,
)
from torchmn.environment_variables import MONITOR_VARIABLE
from torchmn.errors import LaunchError
from torchmn.exit_status import shell_code
from torchmn.launch.line_splitter import LineSplitter
from torchmn.monitor.bootstrap import with_bootstrap
from torchmn.monitor.script_link import ScriptLink
from torchmn.topology import CpuAssignment

_MAX_PENDING_BYTES = 1 << 20
"""With more bytes to be sent, the script's output is not read until the supervisor catches up."""
_LEFTOVER_S = 1.0
"""How long processes that the script left may take to exit before they get SIGTERM."""
_REFRESH_PERIOD_S = 0.2
_DISCONNECT_S = 10.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class _Pipe:
    """One output stream of the script."""

    stream: Stream
    file: IO[bytes]
    splitter: LineSplitter = field(default_factory=LineSplitter)


class Agent:
    """Runs the script of one rank until it and all processes that it started have exited."""

    def __init__(
        self,
        rank: int,
        order: StartScript,
        channel: Channel,
        wakeup: socket.socket,
        share: CpuAssignment,
        beside: str = "",
    ) -> None:
        self._rank = rank
        self._order = order
        self._channel = channel
        self._wakeup = wakeup
        self._share = share
        self._beside = beside
        self._log: IO[bytes] | None = None
        self._pipes: list[_Pipe] = []
        self._script_pid = 0
        self._returncode: int | None = None
        self._started_at = self._ended_at = 0.0
        self._ended_by: EndedBy = "itself"
        self._kill_at: float | None = None
        self._end_leftovers_at: float | None = None
        self._kill_leftovers_at = 0.0
        self._refreshed_at = 0.0
        self._link = ScriptLink(channel.post)

    def run(self, env: Mapping[str, str]) -> int:
        """Start the script, forward its output and signals, report how it ended; its exit code."""
        self._open_log()
        self._start(env)
        while not self._is_over():
            self._wait()
            self._enforce_deadlines()
        self._drain()
        if self._returncode is None:  # cannot be: `_is_over` waits for it
            raise LaunchError("The script has no exit code.")
        self._write_exit_file(self._returncode)
        self._channel.post(
            Exit(returncode=self._returncode, ended_at=self._ended_at, ended_by=self._ended_by)
        )
        self._wait_for_disconnect()
        return shell_code(self._returncode)

    # ---- start --------------------------------------------------------------------------------

    def _open_log(self) -> None:
        path = Path(self._order.log_dir) / f"rank{self._rank}.log"
        try:
            make_private_folder(path.parent)  # another host's disk may lack it
            self._log = open(  # noqa: SIM115 - lives as long as the agent
                path, "wb", buffering=0, opener=open_private
            )
        except OSError as error:
            self._channel.post(LogWarning(text=f"cannot write {path}: {error}"))

    def _start(self, env: Mapping[str, str]) -> None:
        self._started_at = time.time()
        process = subprocess.Popen(
            with_bootstrap(self._order.argv),
            cwd=self._order.cwd,
            env={**env, MONITOR_VARIABLE: self._link.variable()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            close_fds=False,  # PMI_FD of MPICH: a connection opened by the launcher
            start_new_session=True,
            preexec_fn=kill_on_parent_death(),
        )
        self._script_pid = process.pid
        self._link.script_started(process.pid)
        process.returncode = 0  # this class reaps; without it Popen would warn
        for stream, pipe in (("out", process.stdout), ("err", process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._pipes.append(_Pipe("out" if stream == "out" else "err", pipe))
        self._channel.post(
            ScriptStarted(
                pid=process.pid,
                cores=sorted(self._share.cores),
                num_threads=self._num_threads(env),
                beside=self._beside,
            )
        )

    def _num_threads(self, env: Mapping[str, str]) -> int:
        text = env.get("OMP_NUM_THREADS", "")
        return int(text) if text.isdigit() else self._share.num_threads

    # ---- the loop -----------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._returncode is not None and not descendants(os.getpid())

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
            if self._channel.pending_bytes < _MAX_PENDING_BYTES:
                for pipe in self._pipes:
                    selector.register(pipe.file, selectors.EVENT_READ, pipe)
            for key, _ in selector.select(self._timeout_s()):
                if isinstance(key.data, _Pipe):
                    self._on_output(key.data)
                else:
                    key.data()

    def _timeout_s(self) -> float | None:
        if self._returncode is not None:
            return 0.02  # waiting for processes that the script has left
        deadlines = [at for at in (self._kill_at, self._link.reply_by) if at is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _on_signals(self) -> None:
        numbers = self._wakeup.recv(64)
        for pid, returncode in reap_children():
            if pid == self._script_pid:
                self._returncode = returncode
                self._ended_at = time.time()
                self._link.forward_messages()  # its last messages, before its exit is reported
        for number in numbers:
            if number in _ENDING_SIGNALS:
                self._terminate(number, "outside")

    def _on_messages(self) -> None:
        self._channel.flush()
        for message in self._channel.collect():
            if isinstance(message, Terminate):
                self._link.post(message)
                self._terminate(message.signum, "supervisor")
            elif isinstance(message, StatusRequest):
                self._link.request_status()
            elif isinstance(message, ForwardSignal) and self._returncode is None:
                send(self._script_pid, message.signum)  # not to its children
        if not self._channel.is_open:
            self._terminate(signal.SIGTERM, "outside")  # the supervisor is dead

    def _on_output(self, pipe: _Pipe) -> None:
        with suppress(BlockingIOError):
            self._on_chunk(pipe, os.read(pipe.file.fileno(), 1 << 16))

    def _on_chunk(self, pipe: _Pipe, chunk: bytes) -> None:
        """Write and send a chunk; an empty one is the end of the stream."""
        if not chunk:
            self._send_lines(pipe.stream, pipe.splitter.finish())
            self._pipes.remove(pipe)
            pipe.file.close()
            return
        self._write_log(chunk)
        self._send_lines(pipe.stream, pipe.splitter.feed(chunk))
        unfinished = pipe.splitter.unfinished
        if unfinished and self._order.wants_refreshes:
            now = time.monotonic()
            if now - self._refreshed_at > _REFRESH_PERIOD_S:
                self._refreshed_at = now
                self._channel.post(Refresh(text=unfinished))

    def _send_lines(self, stream: Stream, lines: list[str]) -> None:
        if lines:
            self._channel.post(Output(stream=stream, lines=lines))

    def _write_log(self, chunk: bytes) -> None:
        """Write to the rank's file. On a full disk the file ends, the training continues."""
        if self._log is None:
            return
        try:
            while chunk:  # an unbuffered file may take only a part
                chunk = chunk[self._log.write(chunk) :]
        except OSError as error:
            self._channel.post(LogWarning(text=f"stopped writing {self._log.name}: {error}"))
            self._log.close()
            self._log = None

    # ---- the end ------------------------------------------------------------------------------

    def _terminate(self, signum: int, by: EndedBy) -> None:
        """Send a signal to the script; the first one starts its grace period."""
        if self._returncode is not None:
            return
        if self._kill_at is None:
            self._ended_by = by
            self._kill_at = time.monotonic() + self._order.grace_s
            if is_stopped(self._script_pid):  # it would get no other signal
                self._kill_at = time.monotonic()
        send_group(self._script_pid, signum)

    def _enforce_deadlines(self) -> None:
        """Kill what has had its time: first the script, then the processes it has left."""
        now = time.monotonic()
        self._link.reply_if_overdue()
        if self._returncode is None:
            if self._kill_at is not None and now >= self._kill_at:
                send_group(self._script_pid, signal.SIGKILL)
                kill_descendants(os.getpid())
                self._kill_at = now + 0.1
            return
        if self._end_leftovers_at is None:
            # the grace period of a script that was terminated is that of its children as well
            wait_s = 0.0 if self._kill_at is not None else _LEFTOVER_S
            self._end_leftovers_at = now + wait_s
            self._kill_leftovers_at = self._end_leftovers_at + _LEFTOVER_S
        if now >= self._kill_leftovers_at:
            kill_descendants(os.getpid())
        elif now >= self._end_leftovers_at:
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGTERM)

    def _drain(self) -> None:
        """Read what is still in the pipes. Nothing writes to them any longer."""
        while self._pipes:
            pipe = self._pipes[0]
            try:
                self._on_chunk(pipe, os.read(pipe.file.fileno(), 1 << 16))
            except BlockingIOError:  # a process outside our tree holds the other end
                self._on_chunk(pipe, b"")

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
            temporary = path.with_suffix(".tmp")
            with open(temporary, "w", opener=open_private) as file:
                file.write(json.dumps(record, indent=1) + "\n")
            temporary.replace(path)
        except OSError as error:
            self._channel.post(LogWarning(text=f"cannot write {path}: {error}"))

    def _wait_for_disconnect(self) -> None:
        """Stay until the supervisor has read everything and closes the connection.

        For a rank that failed it does so late: mpirun must not see the failure before the other
        ranks have been asked to end.
        """
        leave_at = time.monotonic() + self._order.grace_s + _DISCONNECT_S
        while self._channel.is_open and time.monotonic() < leave_at:
            if self._channel.pending_bytes and self._kill_at is None:
                leave_at = time.monotonic() + self._order.grace_s + _DISCONNECT_S  # a slow reader
            with selectors.DefaultSelector() as selector:
                events = selectors.EVENT_READ
                if self._channel.pending_bytes:
                    events |= selectors.EVENT_WRITE
                selector.register(self._channel, events)
                selector.select(0.5)
            self._channel.flush()
            self._channel.collect()
        with suppress(OSError):
            self._channel.close()


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="milliseconds")
