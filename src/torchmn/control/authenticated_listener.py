"""Authentication of every connection between the processes of a job, by the secret of the job.

Three lines are exchanged before anything else on a connection:

1. listener: a random number.
2. client: a random number of its own, its identity, and the HMAC-SHA256 of all of this under the
   secret. The listener closes the connection without a reply if it is wrong.
3. listener: the HMAC of the same, as the listener. The client closes the connection if it is wrong.

Both sides sign both numbers, so that a recording cannot be replayed. They sign which side they are,
so that neither can be answered with its own bytes, and the role of the listener, since a job has
several listeners and one secret. What an unauthenticated client sends is compared, never parsed.

Unauthenticated clients cannot be kept from connecting. So only a limited number of connections is
pending at a time, for a limited time, and the oldest of the host that has most of them is dropped
for a new one. A client that knows the secret replies within a round trip, and connects again if it
was dropped.

This authenticates; it does not encrypt. Whoever can read or change packets between the hosts can
read and change what is sent afterwards, see docs/security.md.
"""

import errno
import hashlib
import hmac
import re
import secrets
import selectors
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from torchmn.base.errors import LaunchError, UsageError
from torchmn.cluster.environment_variables import SECRET_VARIABLE
from torchmn.control.connection import Channel
from torchmn.control.messages import Message, decode, encode

HANDSHAKE_S = 5.0
MAX_PENDING = 64
MAX_IDENTITY_BYTES = 4096  # of what a client sends before it is authenticated

_GREETING = b"torchmn listener 1 "
_NONCE_CHARS = 32
_PROOF_CHARS = hashlib.sha256().digest_size * 2
_RESPONSE = re.compile(rb"([0-9a-f]{%d}) ([0-9a-f]{%d}) ([^\n]+\n)" % (_NONCE_CHARS, _PROOF_CHARS))
_MAX_AT_ONCE = 64  # connections accepted in one call: the process has other things to do
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RESOURCES_PAUSE_S = 0.2
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
# For SO_LINGER: drop the connection at once, so that the kernel keeps nothing of it either.
_ABORT = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _PendingConnection:
    """A connection whose client has not authenticated yet."""

    connection: socket.socket
    host: str
    nonce: str
    drop_at: float
    received: bytearray = field(default_factory=bytearray)


class AuthenticatedListener:
    """Accepts clients that know the secret, in one thread and without blocking.

    Register it with a selector, and call `admit` or `accept` when it is ready and about every
    second. ``role`` names this listener among those of the job. ``listener`` is closed with it.

    Raises UsageError: the secret is empty.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: str,
        role: str,
        max_pending: int = MAX_PENDING,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        if not secret:
            raise UsageError(f"The listener of the {role} needs a secret, got an empty one.")
        self._listener = listener
        self._secret = secret
        self._role = role
        self._max_pending = max_pending
        self._handshake_s = handshake_s
        self._pending: dict[_PendingConnection, None] = {}  # the oldest first
        self._listen_again_at: float | None = None
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `admit` has something to do."""
        number: int = self._selector.fileno()
        return number

    def admit(self) -> list[tuple[Channel, Message]]:
        """Serve pending clients; return channel and identity of those that have authenticated.

        The caller decides whether it expects such a client, and closes the channel otherwise.
        """
        admitted = []
        for connection, identity in self.accept():
            try:
                admitted.append((Channel(connection), decode(identity)))
            except ValueError:  # it knows the secret, and is no process of this version of torchmn
                connection.close()
        return admitted

    def accept(self) -> list[tuple[socket.socket, bytes]]:
        """Serve pending clients as `admit` does; return sockets and identity lines.

        For clients that do not send messages.
        """
        accepted = []
        has_new_clients = False
        for key, _ in self._selector.select(0):
            if key.data is None:
                has_new_clients = True
            elif (client := self._receive(key.data)) is not None:
                accepted.append(client)
        now = time.monotonic()
        for pending in [each for each in self._pending if now > each.drop_at]:
            self._drop(pending)  # received first: it may be this process that was late
        if self._listen_again_at is not None and now > self._listen_again_at:
            self._listen_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if has_new_clients:
            self._accept_new()
        return accepted

    def close(self) -> None:
        """Drop all pending connections and stop listening."""
        for pending in list(self._pending):
            self._drop(pending)
        self._selector.close()
        self._listener.close()

    def _accept_new(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            try:
                connection, (host, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:  # else the listener would stay ready
                    self._drop_oldest()
                    self._selector.unregister(self._listener)
                    self._listen_again_at = time.monotonic() + _RESOURCES_PAUSE_S
                    return
                continue  # the client has closed it already
            if len(self._pending) >= self._max_pending:
                self._drop_oldest()
            drop_at = time.monotonic() + self._handshake_s
            pending = _PendingConnection(connection, host, _new_nonce(), drop_at)
            self._pending[pending] = None
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, pending)
            self._send(pending, _GREETING + pending.nonce.encode() + b"\n")

    def _drop_oldest(self) -> None:
        """Drop the oldest pending connection of the host that has most of them."""
        if self._pending:
            ((host, _),) = Counter(each.host for each in self._pending).most_common(1)
            self._drop(next(each for each in self._pending if each.host == host))

    def _receive(self, pending: _PendingConnection) -> tuple[socket.socket, bytes] | None:
        try:
            # One byte above the limit, by which a line that is too long is recognized.
            chunk = pending.connection.recv(MAX_IDENTITY_BYTES + 1 - len(pending.received))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            chunk = b""
        pending.received += chunk
        if chunk and b"\n" not in chunk and len(pending.received) <= MAX_IDENTITY_BYTES:
            return None  # incomplete
        client = self._authenticate(pending) if chunk else None
        if client is None:
            self._drop(pending)
        return client

    def _authenticate(self, pending: _PendingConnection) -> tuple[socket.socket, bytes] | None:
        """Accept a client that has sent one complete, signed line, and nothing after it."""
        response = _RESPONSE.fullmatch(bytes(pending.received))
        if response is None:
            return None
        nonce, proof, identity = response.groups()
        signed = (self._role, pending.nonce.encode(), nonce, identity)
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", *signed)):
            return None
        if not self._send(pending, _proof(self._secret, b"listener", *signed) + b"\n"):
            return None
        self._selector.unregister(pending.connection)
        del self._pending[pending]
        return pending.connection, identity

    def _send(self, pending: _PendingConnection, line: bytes) -> bool:
        """Send a line, for which a new connection has room; return False if it is closed."""
        with suppress(OSError):
            return pending.connection.send(line) == len(line)
        return False

    def _drop(self, pending: _PendingConnection) -> None:
        del self._pending[pending]
        self._selector.unregister(pending.connection)
        with suppress(OSError):
            pending.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        pending.connection.close()


def connect_authenticated(
    address: str, *, secret: str, role: str, identity: Message, limit_s: float = 30.0
) -> Channel:
    """Connect to the listener of ``role`` at ``host:port`` and authenticate. Blocks.

    Connects again if the connection was dropped, until the limit. Raises LaunchError: no process
    listens there, or one that does not know the secret, or it did not accept the connection.
    """
    line = encode(identity)
    return Channel(connect(address, secret=secret, role=role, line=line, limit_s=limit_s))


def connect(
    address: str,
    *,
    secret: str,
    role: str,
    line: bytes,
    limit_s: float = 30.0,
    retries: bool = True,
) -> socket.socket:
    """Connect as `connect_authenticated` does, for a client that does not send messages.

    ``line`` is the identity, ending with a newline. With ``retries=False`` a dropped connection
    raises LaunchError at once.
    """
    deadline = time.monotonic() + limit_s
    pause_s = _FIRST_PAUSE_S
    if len(line) + _NONCE_CHARS + _PROOF_CHARS + 2 > MAX_IDENTITY_BYTES:
        raise LaunchError(
            f"The identity that is sent to the {role} must be shorter than {MAX_IDENTITY_BYTES} "
            f"bytes, and {line[:80]!r} has {len(line)}."
        )
    while True:
        try:
            host, _, port = address.rpartition(":")
            left_s = max(0.001, deadline - time.monotonic())
            connection = socket.create_connection((host, int(port)), timeout=left_s)
        except (ConnectionRefusedError, socket.gaierror, ValueError, OverflowError) as error:
            # Nothing listens there, or the address is wrong: no use in trying again.
            raise LaunchError(f"The {role} at {address!r} does not answer: {error}.") from None
        except OSError as error:
            problem = str(error)
        else:
            try:
                return _authenticate(connection, secret, role, line, deadline)
            except OSError as error:
                connection.close()
                problem = str(error)
            except BaseException:
                connection.close()
                raise
        if not retries or time.monotonic() + pause_s > deadline:
            raise LaunchError(
                f"The {role} at {address!r} does not answer: {problem}. Check that it runs, and "
                f"that {SECRET_VARIABLE} is the same here, on {socket.gethostname()}, as there."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _authenticate(
    connection: socket.socket, secret: str, role: str, identity: bytes, deadline: float
) -> socket.socket:
    """Perform the client's part of the handshake.

    Raises OSError: the connection was dropped. Raises LaunchError: this is another listener.
    """
    greeting = _read(connection, len(_GREETING) + _NONCE_CHARS + 1, deadline)
    found = re.fullmatch(_GREETING + rb"([0-9a-f]{%d})\n" % _NONCE_CHARS, greeting)
    if found is None:
        raise LaunchError(
            f"The process at this address is not the {role} of a torchmn job: it sent {greeting!r}."
        )
    nonce = _new_nonce().encode()
    signed = (role, found[1], nonce, identity)
    # Nothing else may follow before the answer: the listener rejects more than this line.
    connection.sendall(b" ".join((nonce, _proof(secret, b"client", *signed), identity)))
    answer = _read(connection, _PROOF_CHARS + 1, deadline)
    if not hmac.compare_digest(answer, _proof(secret, b"listener", *signed) + b"\n"):
        raise LaunchError(
            f"The process at this address is not the {role} of this job: it does not know the "
            "secret."
        )
    return connection


def _read(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Read exactly this number of bytes. Raises OSError: they did not arrive in time."""
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(num_bytes - len(received))
        if not chunk:
            raise ConnectionAbortedError("it closed the connection")
        received += chunk
    return received


def _new_nonce() -> str:
    return secrets.token_hex(_NONCE_CHARS // 2)


def _proof(
    secret: str, side: bytes, role: str, listener_nonce: bytes, client_nonce: bytes, identity: bytes
) -> bytes:
    """Return the HMAC that proves that ``side`` knows the secret."""
    # Unambiguous: only the identity, which comes last, may contain any byte.
    signed = b"\n".join((_GREETING, side, role.encode(), listener_nonce, client_nonce, identity))
    return hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest().encode()
