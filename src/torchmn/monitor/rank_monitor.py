"""``python -m torchmn.monitor.rank_monitor``: stands beside one rank of a foreign launcher.

Under ``torchmn run`` the agent is the parent of the script and hears of its end from the system.
Here somebody else is the parent, so the sentinel watches from beside: it carries the script's
words to the hub, which hears all ranks, and ends the script when the hub says so, or when there is
no hub any more. It is started by the script (`torchmn.resilience.install_crash_handler`), reads its
order, a line of JSON, from its standard input, and ends soon after the script.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from torchmn.control.authenticated_listener import connect_authenticated
from torchmn.control.connection import Channel
from torchmn.control.messages import (
    EndedBy,
    Exit,
    Failed,
    Leaving,
    Message,
    MonitorHello,
    StatusRequest,
    Terminate,
)
from torchmn.control.processes import is_running, is_stopped, send, zombie_returncode
from torchmn.errors import LaunchError
from torchmn.monitor.script_link import ScriptLink
from torchmn.monitor.server import ROLE

_PERIOD_S = 0.2
_GOODBYE_S = 10.0
_WORDLESS = (
    "ended without a word: by SIGKILL (from outside, or because the memory was full) or by "
    "os._exit; what started it may know more"
)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a sentinel is to do: whom to watch, and where the hub is."""

    rank: int
    pid: int
    hub: str
    secret: str
    grace_s: float


class RankMonitor:
    """Watches one script. One thread."""

    def __init__(self, order: Order, connection: socket.socket, hub: Channel) -> None:
        self._order = order
        self._hub = hub
        self._link = ScriptLink(self._pass_on, connection)
        self._link.begin(order.pid)
        self._failed: Failed | None = None
        self._has_left = False
        self._left_with = 0
        self._kill_at: float | None = None
        self._own_fault = True

    def run(self) -> None:
        """Until the script has ended and the hub knows."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._hub, selectors.EVENT_READ)
            selector.register(self._link, selectors.EVENT_READ)
            watched_pid = _register_end(selector, self._order.pid)
            while True:
                selector.select(_PERIOD_S)
                self._hear_hub()
                if not self._hub.is_open:
                    _drop(selector, self._hub)
                self._link.pass_on()
                if not self._link.is_open:
                    _drop(selector, self._link)
                self._link.answer_if_silent()
                if not is_running(self._order.pid):
                    break
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    send(self._order.pid, signal.SIGKILL)
            if watched_pid is not None:
                os.close(watched_pid)
        self._say_goodbye()

    def _pass_on(self, message: Message) -> None:
        if isinstance(message, Failed):
            self._failed = message
        elif isinstance(message, Leaving):
            self._has_left, self._left_with = True, message.status
        self._hub.post(message)

    def _hear_hub(self) -> None:
        was_open = self._hub.is_open
        self._hub.flush()
        for message in self._hub.collect():
            if isinstance(message, StatusRequest):
                self._link.ask()
            elif isinstance(message, Terminate):
                self._end(message)
        if was_open and not self._hub.is_open and self._kill_at is None and not self._has_left:
            print(
                f"torchmn: rank {self._order.rank} on {socket.gethostname()} has lost the hub of "
                "the job, which runs on the host of rank 0: that host or the network is gone. The "
                "rank ends.",
                file=sys.stderr,
                flush=True,
            )
            self._end(Terminate(signum=signal.SIGTERM))

    def _end(self, order: Terminate) -> None:
        if self._kill_at is not None:
            return
        self._own_fault = False
        is_deaf = is_stopped(self._order.pid)
        self._kill_at = time.monotonic() + (0.0 if is_deaf else self._order.grace_s)
        self._link.post(order)
        send(self._order.pid, order.signum)

    def _say_goodbye(self) -> None:
        """Tell the hub how the script ended, and stay until it has heard it."""
        self._link.pass_on()
        code, note = self._how_it_ended()
        by: EndedBy = "itself" if self._own_fault else "supervisor"
        self._hub.post(Exit(returncode=code, ended_at=time.time(), ended_by=by, note=note))
        leave_at = time.monotonic() + _GOODBYE_S
        while self._hub.is_open and time.monotonic() < leave_at:
            time.sleep(0.05)
            self._hub.flush()
            self._hub.collect()

    def _how_it_ended(self) -> tuple[int, str]:
        code = zombie_returncode(self._order.pid)
        if code is not None:
            return code, ""
        if self._failed is not None:
            return self._failed.status, ""
        if self._has_left:
            return self._left_with, ""
        return -signal.SIGKILL, _WORDLESS


def _register_end(selector: selectors.BaseSelector, pid: int) -> int | None:
    """Wake up when the process ends, where the system can tell; else the period must do."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):
            descriptor = os.pidfd_open(pid)
            selector.register(descriptor, selectors.EVENT_READ)
            return descriptor
    return None


def _drop(selector: selectors.BaseSelector, channel: Channel | ScriptLink) -> None:
    with suppress(KeyError, ValueError):
        selector.unregister(channel)


def main() -> int:
    """Take the order, meet the hub, watch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the script, which we report
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told = json.loads(sys.stdin.readline())
    connection = socket.socket(fileno=int(told.pop("descriptor")))
    order = Order(**told)
    identity = MonitorHello(rank=order.rank, host=socket.gethostname(), pid=order.pid)
    try:
        hub = connect_authenticated(order.hub, secret=order.secret, role=ROLE, identity=identity)
    except LaunchError as error:
        print(f"torchmn: rank {order.rank}: {error}", file=sys.stderr, flush=True)
        return 1
    RankMonitor(order, connection, hub).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
