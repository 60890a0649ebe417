"""A TCP connection that carries messages between two processes of a job, without blocking.

The output of ranks travels here too, since mpirun and srun interleave it in the middle of lines.
The end of a connection tells either side that the other one is dead, on any host. Both sides have
authenticated (`torchmn.control.authenticated_listener`) before there is a `Channel`.
"""

import errno
import select
import socket
import time
from typing import TypeVar

from torchmn.base.errors import LaunchError
from torchmn.cluster.network import addresses_of_host, family_of
from torchmn.control.messages import Message, decode, encode

SUPERVISOR = "supervisor"  # the role of the listener, see `torchmn.control.authenticated_listener`
HOST_TIMEOUT_S = 8.0  # a host whose kernel does not answer for this long is taken for lost
# Describes a host whose `Channel` is silent.
UNREACHABLE = f"has not answered for {HOST_TIMEOUT_S:g} s (network or host failure)"
_KEEPALIVE_S = 2
_UNREACHABLE_ERRORS = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
_CHUNK_BYTES = 1 << 16
# So that a peer that sends without pause cannot keep the process from everything else.
_MAX_CHUNKS_AT_ONCE = 16

AnyMessage = TypeVar("AnyMessage", bound=Message)


class Channel:
    """A connection that never blocks: messages that cannot be sent yet wait in a buffer.

    Not thread-safe.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            set_timeouts(connection)
        self._socket = connection
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._received: list[Message] = []
        self.is_open = True
        self._is_broken = False  # nothing can be sent any more
        # Whether it has ended because the peer's host does not answer, not by the peer.
        self.is_silent = False

    def fileno(self) -> int:
        """Return the descriptor of the socket, for selectors."""
        return self._socket.fileno()

    @property
    def pending_bytes(self) -> int:
        """Number of bytes that wait to be sent."""
        return len(self._outbox) if self.is_open else 0

    def post(self, message: Message) -> None:
        """Send a message now or as soon as there is room; does nothing once the peer is gone."""
        if self.is_open and not self._is_broken:
            self._outbox += encode(message)
            self.flush()

    def flush(self) -> None:
        """Send as much of the buffer as the socket takes."""
        while self._outbox and self.is_open:
            try:
                sent = self._socket.send(self._outbox)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(error)  # what the peer has sent before is still to be read
                return
            del self._outbox[:sent]

    def collect(self) -> list[Message]:
        """Return messages that have arrived; ``is_open`` is false once all have been returned."""
        for _ in range(_MAX_CHUNKS_AT_ONCE if self.is_open else 0):
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._fail(error)
                self.is_open = False
                break
            if not chunk:
                self.is_open = False
                break
            self._inbox += chunk
        *lines, rest = bytes(self._inbox).split(b"\n")
        self._inbox = bytearray(rest)
        received, self._received = self._received, []
        try:
            return received + [decode(line) for line in lines]
        except ValueError:
            self.is_open = False  # the peer is not a process of torchmn
            return received

    def wait_for(self, kind: type[AnyMessage], limit_s: float) -> AnyMessage:
        """Wait for the next message and return it. Blocks.

        Raises LaunchError: it has another type, did not arrive in time, or the connection ended.
        """
        deadline = time.monotonic() + limit_s
        while True:
            messages = self.collect()
            if messages and isinstance(messages[0], kind):
                # What came together with it is for whoever calls `collect` next.
                self._received = messages[1:]
                return messages[0]
            if messages or not self.is_open:
                raise LaunchError(
                    f"The supervisor closed the connection instead of sending {kind.__name__}."
                )
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LaunchError(f"The supervisor sent no {kind.__name__} within {limit_s:g} s.")
            poll = select.poll()  # select() supports only the first 1024 descriptors
            poll.register(self._socket, select.POLLIN)
            poll.poll(1000 * left_s)

    def _fail(self, error: OSError) -> None:
        self._is_broken = True
        self._outbox.clear()
        self.is_silent = self.is_silent or error.errno in _UNREACHABLE_ERRORS

    def close(self) -> None:
        """Send as much of the buffer as the socket takes, and close the connection."""
        self.flush()
        self.is_open = False
        self._socket.close()


def set_timeouts(connection: socket.socket) -> None:
    """Disable send delays, and let the connection fail once the peer's host is lost.

    The kernel of the host answers for as long as the host is up, so a process that is stopped is
    not taken for lost.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, _KEEPALIVE_S),
        # The idle time counts as one more period until the limit.
        (socket.TCP_KEEPCNT, round(HOST_TIMEOUT_S / _KEEPALIVE_S) - 1),
        # for data that is not acknowledged
        (socket.TCP_USER_TIMEOUT, round(1000 * HOST_TIMEOUT_S)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def address_of(listener: socket.socket) -> str:
    """Return ``host:port`` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


def reserve_port(host: str = "127.0.0.1") -> tuple[socket.socket, int]:
    """Reserve a free port of ``host`` (empty for all addresses); return the socket and the port.

    The socket is bound and does not listen: on Linux a second socket may then bind the same port
    if both set SO_REUSEADDR, as torch's store does, while no other process is given the port. So
    it can stay open for the life of the job.
    """
    keeper = socket.socket(family_of(host), socket.SOCK_STREAM)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind((host, 0))
    port: int = keeper.getsockname()[1]
    return keeper, port


def listen_on(host: str = "127.0.0.1", port: int = 0, *, backlog: int = 1024) -> socket.socket:
    """Listen at a name or address, empty for all IPv4 addresses. Raises OSError."""
    address = next(iter(addresses_of_host(host)), host) if host else ""
    return socket.create_server((address, port), family=family_of(address), backlog=backlog)
