"""One TCP connection between the supervisor and the agent of each rank.

mpirun and srun mix the output of ranks in chunks, so the lines travel here instead. The end of
the connection tells either side that the other one is dead, on any host and operating system.
Both sides have proved that they know the job's secret, at the gate, before there is a channel.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from typing import TypeVar

from torchmn.control.messages import Message, decode, encode
from torchmn.errors import LaunchError

ADDRESS_VARIABLE = "TORCHMN_SUPERVISOR"
SUPERVISOR = "supervisor"
"""Whose gate it is, see `torchmn.control.authenticated_listener`."""
_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
_CHUNK_BYTES = 1 << 16
_NUM_CHUNKS_AT_ONCE = 16
"""A peer that never stops talking must not keep us from everything else."""

AnyMessage = TypeVar("AnyMessage", bound=Message)


class Channel:
    """A connection that never blocks: what cannot leave yet waits in a buffer."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            _watch_host(connection)
        self._socket = connection
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._arrived: list[Message] = []
        self.is_open = True
        self.is_silent = False
        """Whether it has ended because nothing comes through any more, not by the other side."""

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def pending_bytes(self) -> int:
        """How much has not left yet."""
        return len(self._outbox) if self.is_open else 0

    def post(self, message: Message) -> None:
        """Send a message now or as soon as there is room; nothing once the peer is gone."""
        if self.is_open:
            self._outbox += encode(message)
            self.flush()

    def flush(self) -> None:
        """Send what fits."""
        while self._outbox and self.is_open:
            try:
                sent = self._socket.send(self._outbox)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(error)
                return
            del self._outbox[:sent]

    def collect(self) -> list[Message]:
        """Some of the messages that have arrived; ``is_open`` turns false behind the last one."""
        for _ in range(_NUM_CHUNKS_AT_ONCE if self.is_open else 0):
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._end(error)
                break
            if not chunk:
                self.is_open = False
                break
            self._inbox += chunk
        *lines, rest = bytes(self._inbox).split(b"\n")
        self._inbox = bytearray(rest)
        arrived, self._arrived = self._arrived, []
        try:
            return arrived + [decode(line) for line in lines]
        except ValueError:
            self.is_open = False  # not one of ours
            return arrived

    def wait_for(self, kind: type[AnyMessage], limit_s: float) -> AnyMessage:
        """The next message, which must be of this kind. Blocks. Raises LaunchError."""
        deadline = time.monotonic() + limit_s
        while True:
            messages = self.collect()
            if messages and isinstance(messages[0], kind):
                self._arrived = messages[1:]
                return messages[0]
            if messages or not self.is_open:
                raise LaunchError(f"The supervisor hung up instead of sending {kind.__name__}.")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LaunchError(f"The supervisor sent no {kind.__name__} within {limit_s:g} s.")
            poll = select.poll()  # select() knows only the first 1024 descriptors
            poll.register(self._socket, select.POLLIN)
            poll.poll(1000 * left_s)

    def _end(self, error: OSError) -> None:
        self.is_open = False
        self.is_silent = error.errno in _SILENT

    def close(self) -> None:
        """Send what fits and close."""
        self.flush()
        self.is_open = False
        self._socket.close()


def _watch_host(connection: socket.socket) -> None:
    """Send at once, and notice a host that is lost: its kernel answers as long as it lives.

    So a process that is stopped is not taken for lost. The connection then ends with an error.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 8000),  # milliseconds, for what was sent and not acknowledged
    ):
        if hasattr(socket, name):  # as on Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(host: str = "127.0.0.1") -> socket.socket:
    """A listening socket for the supervisor."""
    listener = socket.create_server((host, 0), backlog=1024)
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """``host:port`` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"
