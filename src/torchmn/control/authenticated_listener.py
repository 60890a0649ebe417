"""The door of our own listeners: who does not know the job's secret gets nothing and stops nobody.

Three lines, before anything else is said on a connection:

1. gate: a fresh number.
2. visitor: a fresh number of its own, who it is, and the HMAC-SHA256 of all of this under the
   secret. The gate hangs up if it is wrong, and says nothing.
3. gate: the HMAC of the same, as gate. The visitor hangs up if it is wrong.

Both sides sign both numbers, so that nothing recorded is of use a second time. They sign which of
the two they are, so that nobody can be answered with his own words, and for which gate, since a job
has several gates and one secret. What a stranger says is compared, never parsed.

Strangers cannot be kept from connecting. So few of them wait at a time, for a short time, and the
oldest of the host that has most of them waiting makes room for the next one. A true visitor answers
within a round trip, and comes again if it was turned away in a crowd.

This is about who may speak. It does not encrypt: who can read or change the packets of the network
between the hosts can also read and change what is said behind the gate, see docs/security.md.
"""

from __future__ import annotations

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

from torchmn.control.connection import Channel
from torchmn.control.messages import Message, decode, encode
from torchmn.errors import LaunchError, UsageError

SECRET_VARIABLE = "TORCHMN_SECRET"
"""Where agents and ranks find the job's secret. It is in no command line and in no file."""

HANDSHAKE_S = 5.0
MAX_PENDING = 64
MAX_IDENTITY_BYTES = 4096
"""Of what a visitor says about itself, before it is let in."""

_GREETING = b"torchmn gate 1 "
_NUMBER_CHARS = 32
_PROOF_CHARS = hashlib.sha256().digest_size * 2
_ANSWER = re.compile(rb"([0-9a-f]{%d}) ([0-9a-f]{%d}) ([^\n]+\n)" % (_NUMBER_CHARS, _PROOF_CHARS))
_MOST_AT_ONCE = 64
"""Who lets visitors in has other things to do."""
_OUT_OF_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ROOM_PAUSE_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_ABORT = struct.pack("ii", 1, 0)
"""For SO_LINGER: forget the connection at once, so that the kernel keeps nothing of it either."""


@dataclass(eq=False)
class _Stranger:
    """A connection whose other end has not proved anything yet."""

    connection: socket.socket
    host: str
    number: str
    hang_up_at: float
    said: bytearray = field(default_factory=bytearray)


class AuthenticatedListener:
    """A listener that lets in who knows the secret, in one thread and without ever waiting.

    Watch it with a selector, and call `admit` or `accept` when it is ready and about every second.
    ``role`` says whose gate it is. The listener, which stands on the address that it was bound to,
    is closed with the gate.
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
            raise UsageError(f"The gate of the {role} needs a secret, got an empty one.")
        self._listener = listener
        self._secret = secret
        self._role = role
        self._most_waiting = max_pending
        self._handshake_s = handshake_s
        self._waiting: dict[_Stranger, None] = {}  # the oldest first
        self._listen_again_at: float | None = None
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """For selectors: readable when `admit` has something to do."""
        number: int = self._selector.fileno()
        return number

    @property
    def num_pending(self) -> int:
        """How many have connected and not proved anything yet."""
        return len(self._waiting)

    def admit(self) -> list[tuple[Channel, Message]]:
        """Take a step with everybody who is at the gate. Who is in now, and who they are.

        Whether such a visitor is wanted is for the caller to say: close the channel if not.
        """
        admitted = []
        for connection, identity in self.accept():
            try:
                admitted.append((Channel(connection), decode(identity)))
            except ValueError:
                connection.close()
        return admitted

    def accept(self) -> list[tuple[socket.socket, bytes]]:
        """As `admit`, for visitors who do not speak in messages: their sockets and first lines."""
        accepted = []
        is_knocking = False
        for key, _ in self._selector.select(0):
            if key.data is None:
                is_knocking = True
            elif (visitor := self._hear(key.data)) is not None:
                accepted.append(visitor)
        now = time.monotonic()
        for stranger in [each for each in self._waiting if now > each.hang_up_at]:
            self._turn_away(stranger)  # heard first: it may be us who were late
        if self._listen_again_at is not None and now > self._listen_again_at:
            self._listen_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if is_knocking:
            self._greet()
        return accepted

    def close(self) -> None:
        """Turn everybody away who waits, and stop listening."""
        for stranger in list(self._waiting):
            self._turn_away(stranger)
        self._selector.close()
        self._listener.close()

    def _greet(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, (host, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_ROOM:  # the listener would stay ready, and we spin
                    self._make_room()
                    self._selector.unregister(self._listener)
                    self._listen_again_at = time.monotonic() + _ROOM_PAUSE_S
                    return
                continue  # it left before we came
            if len(self._waiting) >= self._most_waiting:
                self._make_room()
            hang_up_at = time.monotonic() + self._handshake_s
            stranger = _Stranger(connection, host, _new_number(), hang_up_at)
            self._waiting[stranger] = None
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            self._say(stranger, _GREETING + stranger.number.encode() + b"\n")

    def _make_room(self) -> None:
        """Turn away the oldest of the host that has most of them here."""
        if self._waiting:
            ((host, _),) = Counter(each.host for each in self._waiting).most_common(1)
            self._turn_away(next(each for each in self._waiting if each.host == host))

    def _hear(self, stranger: _Stranger) -> tuple[socket.socket, bytes] | None:
        try:
            chunk = stranger.connection.recv(MAX_IDENTITY_BYTES + 1 - len(stranger.said))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            chunk = b""
        stranger.said += chunk
        if chunk and b"\n" not in chunk and len(stranger.said) <= MAX_IDENTITY_BYTES:
            return None  # there is more to come
        visitor = self._recognize(stranger) if chunk else None
        if visitor is None:
            self._turn_away(stranger)
        return visitor

    def _recognize(self, stranger: _Stranger) -> tuple[socket.socket, bytes] | None:
        """Let a visitor in whose line is whole and signed, and which says nothing more yet."""
        words = _ANSWER.fullmatch(bytes(stranger.said))
        if words is None:
            return None
        number, proof, identity = words.groups()
        signed = (self._role, stranger.number.encode(), number, identity)
        if not hmac.compare_digest(proof, _proof(self._secret, b"visitor", *signed)):
            return None
        if not self._say(stranger, _proof(self._secret, b"gate", *signed) + b"\n"):
            return None
        self._selector.unregister(stranger.connection)
        del self._waiting[stranger]
        return stranger.connection, identity

    def _say(self, stranger: _Stranger, line: bytes) -> bool:
        """Whether the line has left; there is room for so few words, or nobody to hear them."""
        with suppress(OSError):
            return stranger.connection.send(line) == len(line)
        return False

    def _turn_away(self, stranger: _Stranger) -> None:
        del self._waiting[stranger]
        self._selector.unregister(stranger.connection)
        with suppress(OSError):
            stranger.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        stranger.connection.close()


def connect_authenticated(
    address: str, *, secret: str, role: str, identity: Message, limit_s: float = 30.0
) -> Channel:
    """The way in for a visitor: prove who we are to the gate of ``role`` at ``host:port``. Blocks.

    It comes again if it was turned away, until the limit. Raises LaunchError: nobody listens there,
    or not the one who knows the secret, or nobody let us in.
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
    insists: bool = True,
) -> socket.socket:
    """As `connect_authenticated`, for a visitor who does not speak in messages. ``line`` says who it is.

    One that does not insist takes being turned away for an answer.
    """
    deadline = time.monotonic() + limit_s
    pause_s = _FIRST_PAUSE_S
    if len(line) + _NUMBER_CHARS + _PROOF_CHARS + 2 > MAX_IDENTITY_BYTES:
        raise LaunchError(
            f"What is said to the {role} before it opens must be shorter than {MAX_IDENTITY_BYTES} "
            f"bytes, and {line[:80]!r} has {len(line)}."
        )
    while True:
        try:
            host, _, port = address.rpartition(":")
            left_s = max(0.001, deadline - time.monotonic())
            connection = socket.create_connection((host, int(port)), timeout=left_s)
        except (ConnectionRefusedError, socket.gaierror, ValueError, OverflowError) as error:
            raise LaunchError(f"The {role} at {address!r} does not answer: {error}.") from None
        except OSError as error:
            problem = str(error)
        else:
            try:
                return _introduce(connection, secret, role, line, deadline)
            except OSError as error:
                connection.close()
                problem = str(error)
            except BaseException:
                connection.close()
                raise
        if not insists or time.monotonic() + pause_s > deadline:
            raise LaunchError(
                f"The {role} at {address!r} does not answer: {problem}. See whether it runs, and "
                f"whether TORCHMN_SECRET is the same here, on {socket.gethostname()}, as there."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _introduce(
    connection: socket.socket, secret: str, role: str, identity: bytes, deadline: float
) -> socket.socket:
    """The visitor's part of the handshake. Raises OSError: turned away; LaunchError: not a gate."""
    greeting = _read(connection, len(_GREETING) + _NUMBER_CHARS + 1, deadline)
    found = re.fullmatch(_GREETING + rb"([0-9a-f]{%d})\n" % _NUMBER_CHARS, greeting)
    if found is None:
        raise LaunchError(f"Who answers instead of the {role} says {greeting!r}.")
    number = _new_number().encode()
    signed = (role, found[1], number, identity)
    connection.sendall(b" ".join((number, _proof(secret, b"visitor", *signed), identity)))
    answer = _read(connection, _PROOF_CHARS + 1, deadline)
    if not hmac.compare_digest(answer, _proof(secret, b"gate", *signed) + b"\n"):
        raise LaunchError(f"Who answers instead of the {role} does not know the secret of the job.")
    return connection


def _read(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """So many bytes and none of what follows them. Raises OSError: they do not come."""
    said = b""
    while len(said) < num_bytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(num_bytes - len(said))
        if not chunk:
            raise ConnectionAbortedError("it hung up")
        said += chunk
    return said


def _new_number() -> str:
    return secrets.token_hex(_NUMBER_CHARS // 2)


def _proof(
    secret: str,
    side: bytes,
    role: str,
    number_of_gate: bytes,
    number_of_visitor: bytes,
    identity: bytes,
) -> bytes:
    """That ``side`` knows the secret. Only the identity, at the end, may hold any character."""
    signed = b"\n".join(
        (_GREETING, side, role.encode(), number_of_gate, number_of_visitor, identity)
    )
    return hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest().encode()
