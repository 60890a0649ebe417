"""``python -m torchmn.run.monitor.rank_monitor``: the agent of one rank that torchmn did not start.

Under ``torchmn run`` the agent is the parent of the script and learns of its end from the system.
Where another launcher is the parent, `torchmn.run.install_crash_handler` starts this process
beside the script. It forwards the script's messages to the monitor server, which is connected to
all ranks, and ends the script when the server requests it or is lost. Its `Order` is a line on
standard input. It exits soon after the script.
"""

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress

from torchmn.base.errors import LaunchError
from torchmn.base.terminal import say
from torchmn.control.authenticated_listener import connect_authenticated
from torchmn.control.codec import Record, decode
from torchmn.control.connection import Channel
from torchmn.control.heartbeat import Heartbeat, LoopClock, answer
from torchmn.control.messages import (
    Alive,
    EndedBy,
    Exit,
    Failed,
    HeartbeatRequest,
    Leaving,
    Message,
    MonitorHello,
    StatusRequest,
    Terminate,
)
from torchmn.control.processes import (
    children,
    command_of,
    exists,
    is_running,
    is_stopped,
    send,
    zombie_returncode,
)
from torchmn.control.script_connection import ScriptLink
from torchmn.run.monitor.server import ROLE

_PERIOD_S = 0.2
_SERVER_MODULE = "torchmn.run.monitor.server"
_DISCONNECT_S = 10.0
# How long the parent of the script may take to see its end. Ranks that the server ends later than
# that do not take its place in the launcher's own report. The server waits for a cause longer.
_REAPED_S = 1.0
_UNKNOWN_END = (
    "terminated without a report: by SIGKILL (sent by another process, or because memory ran out) "
    "or by os._exit; the program that started it may report more"
)


class Order(Record, frozen=True, kw_only=True):
    """The rank and process to monitor, and the address of the monitor server.

    ``descriptor`` is the inherited end of the connection to the script.
    """

    rank: int
    pid: int
    server: str
    secret: str
    grace_s: float
    descriptor: int


class RankMonitor:
    """Monitors one script and reports to the server, in a single thread."""

    def __init__(self, order: Order, connection: socket.socket, server: Channel) -> None:
        self._order = order
        self._server = server
        self._clock = LoopClock()
        self._heartbeat = Heartbeat(server)
        self._link = ScriptLink(self._forward, connection)
        self._link.script_started(order.pid)
        self._failed: Failed | None = None
        self._leaving: Leaving | None = None
        self._kill_at: float | None = None
        self._ended_by: EndedBy = "itself"

    def run(self) -> None:
        """Monitor the script until it has exited and the server knows how."""
        script_end = _exit_descriptor(self._order.pid)
        while is_running(self._order.pid):
            with selectors.DefaultSelector() as selector:
                ends = (each for each in (self._server, self._link) if each.is_open)
                for end in (*ends, *script_end):
                    selector.register(end, selectors.EVENT_READ)
                # A period as well: without pidfd the end of the script wakes nobody.
                selector.select(_PERIOD_S)
            self._receive()
            self._link.forward_messages()
            self._link.reply_if_overdue()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                send(self._order.pid, signal.SIGKILL)
        for descriptor in script_end:
            os.close(descriptor)
        self._report_exit()

    def _forward(self, message: Message) -> None:
        if isinstance(message, Failed):
            self._failed = message
        elif isinstance(message, Leaving):
            self._leaving = message
        self._server.post(message)

    def _receive(self) -> None:
        self._server.flush()
        for message in self._server.collect():
            if isinstance(message, HeartbeatRequest):
                answer(self._server, self._order.pid)
            elif isinstance(message, Alive):
                self._heartbeat.answered()
            elif isinstance(message, StatusRequest):
                self._link.request_status(message)
            elif isinstance(message, Terminate):
                self._terminate(message)
        if self._heartbeat.silent_s(self._clock.tick()) >= self._heartbeat.limit_s:
            self._server.close()
            for pid in children(self._order.pid):  # of rank 0: the server would outlive the job
                if is_stopped(pid) and _SERVER_MODULE in command_of(pid):
                    send(pid, signal.SIGKILL)
        if not self._server.is_open and self._kill_at is None and self._leaving is None:
            say(
                f"rank {self._order.rank} on {socket.gethostname()} has lost the monitor "
                "server, which runs on the host of rank 0: it was killed or stopped, or that host "
                "or the network has failed. The rank is ended."
            )
            self._terminate(Terminate(signum=signal.SIGTERM))

    def _terminate(self, request: Terminate) -> None:
        if self._kill_at is not None:
            return
        self._ended_by = "supervisor"
        grace_s = 0.0 if is_stopped(self._order.pid) else self._order.grace_s
        self._kill_at = time.monotonic() + grace_s
        self._link.post(request)  # to its monitor thread: the main thread may be blocked
        send(self._order.pid, request.signum)

    def _report_exit(self) -> None:
        """Report how the script ended, and wait until the server closes the connection."""
        self._link.forward_messages()
        code, note = self._returncode()
        reaped_by = time.monotonic() + _REAPED_S
        while exists(self._order.pid) and time.monotonic() < reaped_by:
            time.sleep(0.02)
        self._server.post(
            Exit(returncode=code, ended_at=time.time(), ended_by=self._ended_by, note=note)
        )
        # To close it with a request unread would reset it, and could take the report with it.
        leave_at = time.monotonic() + _DISCONNECT_S
        while self._server.is_open and time.monotonic() < leave_at:
            time.sleep(0.05)
            self._server.flush()
            self._server.collect()

    def _returncode(self) -> tuple[int, str]:
        """Return the script's return code, and a description of its end if that is a guess."""
        # Only the parent can reap the script; until it does, /proc tells the exit code.
        code = zombie_returncode(self._order.pid)
        if code is not None:
            return code, ""
        if self._failed is not None:
            return self._failed.status, ""
        if self._leaving is not None:
            return self._leaving.status, ""
        return -signal.SIGKILL, _UNKNOWN_END


def _exit_descriptor(pid: int) -> list[int]:
    """Return the descriptor that is readable when a process has exited, if the system has one."""
    with suppress(AttributeError, OSError):
        return [os.pidfd_open(pid)]
    return []


def main() -> int:
    """Read the order, connect to the server, and monitor the script."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # meant for the script, whose end is reported
    order = decode(sys.stdin.readline(), Order)
    connection = socket.socket(fileno=order.descriptor)
    identity = MonitorHello(
        rank=order.rank, host=socket.gethostname(), pid=order.pid, monitor_pid=os.getpid()
    )
    try:
        server = connect_authenticated(
            order.server, secret=order.secret, role=ROLE, identity=identity
        )
    except LaunchError as error:
        say(f"rank {order.rank}: {error}")
        return 1
    RankMonitor(order, connection, server).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
