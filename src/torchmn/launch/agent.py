"""What an agent does between its orders and its report: the life of one rank's script.

It keeps the rank's output in a file and sends it to the supervisor, passes signals on, and sees to
it that nothing the script started outlives the script, and that the script outlives neither agent
nor supervisor.
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
from torchmn.control.messages import (
    EndedBy,
    Exit,
    ForwardSignal,
    LogWarning,
    Output,
    Refresh,
    ScriptStarted,
    StartScript,
    StatusRequest,
    Stream,
    Terminate,
)
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
from torchmn.errors import LaunchError
from torchmn.exit_status import shell_code
from torchmn.launch.line_splitter import LineSplitter
from torchmn.monitor.script_link import ScriptLink
from torchmn.monitor.script_monitor import WATCH_VARIABLE
from torchmn.topology import CpuAssignment

_FULL_BYTES = 1 << 20
"""With so much waiting to be sent the script's pipes are left alone until the supervisor reads."""
_LEFTOVER_S = 1.0
"""How long processes that the script left behind may take to end before they are told to."""
_REFRESH_PERIOD_S = 0.2
_GOODBYE_S = 10.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class _Pipe:
    """One output stream of the script."""

    stream: Stream
    file: IO[bytes]
    splitter: LineSplitter = field(default_factory=LineSplitter)


class Agent:
    """Runs the script of one rank to its end and to the end of all that it started."""

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
        self._tell_leftovers_at: float | None = None
        self._kill_leftovers_at = 0.0
        self._refreshed_at = 0.0
        self._link = ScriptLink(channel.post)

    def run(self, env: Mapping[str, str]) -> int:
        """Start the script, carry its output and signals, and report how it ended."""
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
        self._say_goodbye()
        return shell_code(self._returncode)

    # ---- start --------------------------------------------------------------------------------

    def _open_log(self) -> None:
        path = Path(self._order.log_dir) / f"rank{self._rank}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # another host's disk may lack it
            self._log = open(path, "wb", buffering=0)  # noqa: SIM115 - lives as long as the agent
        except OSError as error:
            self._channel.post(LogWarning(text=f"cannot write {path}: {error}"))

    def _start(self, env: Mapping[str, str]) -> None:
        self._started_at = time.time()
        process = subprocess.Popen(
            self._order.argv,
            cwd=self._order.cwd,
            env={**env, WATCH_VARIABLE: self._link.invitation()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            close_fds=False,  # PMI_FD of MPICH: a connection that the launcher left open for us
            start_new_session=True,
            preexec_fn=kill_on_parent_death(),
        )
        self._script_pid = process.pid
        self._link.begin(process.pid)
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
        """Wait for output, messages or signals, and deal with them."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ, self._on_signals)
            if self._link.is_open:
                selector.register(self._link, selectors.EVENT_READ, self._link.pass_on)
            if self._channel.is_open:
                events = selectors.EVENT_READ
                if self._channel.pending_bytes:
                    events |= selectors.EVENT_WRITE
                selector.register(self._channel, events, self._on_messages)
            if self._channel.pending_bytes < _FULL_BYTES:
                for pipe in self._pipes:
                    selector.register(pipe.file, selectors.EVENT_READ, pipe)
            for key, _ in selector.select(self._patience_s()):
                if isinstance(key.data, _Pipe):
                    self._on_output(key.data)
                else:
                    key.data()

    def _patience_s(self) -> float | None:
        if self._returncode is not None:
            return 0.02  # looking at what the script has left behind
        deadlines = [at for at in (self._kill_at, self._link.answer_by) if at is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _on_signals(self) -> None:
        numbers = self._wakeup.recv(64)
        for pid, returncode in reap_children():
            if pid == self._script_pid:
                self._returncode = returncode
                self._ended_at = time.time()
                self._link.pass_on()  # its last words, before it is reported to have ended
        for number in numbers:
            if number in _ENDING_SIGNALS:
                self._end(number, "outside")

    def _on_messages(self) -> None:
        self._channel.flush()
        for message in self._channel.collect():
            if isinstance(message, Terminate):
                self._link.post(message)
                self._end(message.signum, "supervisor")
            elif isinstance(message, StatusRequest):
                self._link.ask()
            elif isinstance(message, ForwardSignal) and self._returncode is None:
                send(self._script_pid, message.signum)  # its children know nothing of it
        if not self._channel.is_open:
            self._end(signal.SIGTERM, "outside")  # the supervisor is dead

    def _on_output(self, pipe: _Pipe) -> None:
        with suppress(BlockingIOError):
            self._on_chunk(pipe, os.read(pipe.file.fileno(), 1 << 16))

    def _on_chunk(self, pipe: _Pipe, chunk: bytes) -> None:
        """Keep and send a chunk; an empty one is the end of the stream."""
        if not chunk:
            self._tell(pipe.stream, pipe.splitter.finish())
            self._pipes.remove(pipe)
            pipe.file.close()
            return
        self._keep(chunk)
        self._tell(pipe.stream, pipe.splitter.feed(chunk))
        unfinished = pipe.splitter.unfinished
        if unfinished and self._order.wants_refreshes:
            now = time.monotonic()
            if now - self._refreshed_at > _REFRESH_PERIOD_S:
                self._refreshed_at = now
                self._channel.post(Refresh(text=unfinished))

    def _tell(self, stream: Stream, lines: list[str]) -> None:
        if lines:
            self._channel.post(Output(stream=stream, lines=lines))

    def _keep(self, chunk: bytes) -> None:
        """Write to the rank's file; a full disk costs the file and not the training."""
        if self._log is None:
            return
        try:
            while chunk:  # an unbuffered file may take only a part
                chunk = chunk[self._log.write(chunk) :]
        except OSError as error:
            self._channel.post(LogWarning(text=f"gave up writing {self._log.name}: {error}"))
            self._log.close()
            self._log = None

    # ---- the end ------------------------------------------------------------------------------

    def _end(self, signum: int, who: EndedBy) -> None:
        """Pass a signal on to the script; the first one starts the time it has left."""
        if self._returncode is not None:
            return
        if self._kill_at is None:
            self._ended_by = who
            self._kill_at = time.monotonic() + self._order.grace_s
            if is_stopped(self._script_pid):  # it would hear of no other signal
                self._kill_at = time.monotonic()
        send_group(self._script_pid, signum)

    def _enforce_deadlines(self) -> None:
        """Kill what had its time: first the script, then what the script has left behind."""
        now = time.monotonic()
        self._link.answer_if_silent()
        if self._returncode is None:
            if self._kill_at is not None and now >= self._kill_at:
                send_group(self._script_pid, signal.SIGKILL)
                kill_descendants(os.getpid())
                self._kill_at = now + 0.1
            return
        if self._tell_leftovers_at is None:
            # a script that was told to end has used up the time of its children as well
            wait_s = 0.0 if self._kill_at is not None else _LEFTOVER_S
            self._tell_leftovers_at = now + wait_s
            self._kill_leftovers_at = self._tell_leftovers_at + _LEFTOVER_S
        if now >= self._kill_leftovers_at:
            kill_descendants(os.getpid())
        elif now >= self._tell_leftovers_at:
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGTERM)

    def _drain(self) -> None:
        """Read what is still in the pipes. Nobody writes any more."""
        while self._pipes:
            pipe = self._pipes[0]
            try:
                self._on_chunk(pipe, os.read(pipe.file.fileno(), 1 << 16))
            except BlockingIOError:  # a process outside our tree holds the other end
                self._on_chunk(pipe, b"")

    def _write_exit_file(self, returncode: int) -> None:
        """``rank<r>.exit.json``: how the rank ended, for whoever looks later."""
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
            draft = path.with_suffix(".draft")
            draft.write_text(json.dumps(record, indent=1) + "\n")
            draft.replace(path)
        except OSError as error:
            self._channel.post(LogWarning(text=f"cannot write {path}: {error}"))

    def _say_goodbye(self) -> None:
        """Stay until the supervisor has read everything and hangs up.

        It hangs up late on a rank that failed, so that mpirun does not see the failure before the
        other ranks have been asked to end.
        """
        leave_at = time.monotonic() + self._order.grace_s + _GOODBYE_S
        while self._channel.is_open and time.monotonic() < leave_at:
            if self._channel.pending_bytes and self._kill_at is None:
                leave_at = time.monotonic() + self._order.grace_s + _GOODBYE_S  # a slow reader
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
