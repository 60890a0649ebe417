"""The agent's end of the connection to its script: reports come in, requests go out.

The other end is the script's `torchmn.run.monitor.script_monitor.ScriptMonitor`. For a script that
does not answer, the state of its process is reported instead.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable

from torchmn.control.connection import Channel
from torchmn.control.messages import FromScript, Message, StatusReply, StatusRequest
from torchmn.control.processes import process_state, resident_nbytes


class ScriptLink:
    """The connection to one script; ``forward`` is called with each of the script's messages.

    Without ``connection`` a pair of sockets is created, of which the script inherits one
    (`variable`).
    """

    def __init__(
        self, forward: Callable[[Message], None], connection: socket.socket | None = None
    ) -> None:
        self._script_end: socket.socket | None = None
        if connection is None:
            connection, self._script_end = socket.socketpair()
        self._channel = Channel(connection)
        self._forward = forward
        self._pid = 0
        # The deadlines of the script's replies: a hang may be found while a person inspects.
        self._reply_by: deque[float] = deque()

    @property
    def reply_by(self) -> float | None:
        """The deadline of the script's next reply, None if no status request is pending."""
        return self._reply_by[0] if self._reply_by else None

    @property
    def is_open(self) -> bool:
        """Whether the script, or a process that it started, may still send."""
        return self._channel.is_open

    def fileno(self) -> int:
        """Return the descriptor of the agent's end, for selectors."""
        return self._channel.fileno()

    def variable(self) -> str:
        """The value of `MONITOR_VARIABLE` for the script."""
        if self._script_end is None:
            return ""
        self._script_end.set_inheritable(True)
        # The process id is that of SO_PEERCRED: the script compares it, since a program in between
        # may have closed the descriptor and opened something else.
        return f"{self._script_end.fileno()}:{os.getpid()}"

    def script_started(self, pid: int) -> None:
        """Note that the script runs as process ``pid`` and has inherited its end."""
        self._pid = pid
        if self._script_end is not None:
            self._script_end.close()  # so that the connection ends with the script

    def post(self, message: Message) -> None:
        """Send the script a message."""
        self._channel.post(message)

    def request_status(self, request: StatusRequest) -> None:
        """Request the script's status. The reply is forwarded."""
        self._reply_by.append(time.monotonic() + request.limit_s)
        self._channel.post(request)

    def forward_messages(self) -> None:
        """Forward what the script has sent."""
        self._channel.flush()
        for message in self._channel.collect():
            if isinstance(message, StatusReply) and self._reply_by:
                self._reply_by.popleft()
            # A script does not speak for its agent, such as about how it has ended.
            if isinstance(message, FromScript):
                self._forward(message)

    def reply_if_overdue(self) -> None:
        """Reply in place of a script that has not replied in time."""
        if self._reply_by and time.monotonic() >= self._reply_by[0]:
            self._reply_by.popleft()
            process, kernel_function = process_state(self._pid)
            rss_nbytes = resident_nbytes(self._pid)
            self._forward(
                StatusReply(process=process, kernel_function=kernel_function, rss_nbytes=rss_nbytes)
            )
