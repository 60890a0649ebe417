"""Clients that know the secret are accepted, whatever other clients do."""

import os
import resource
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from tests.limits import limit
from torchmn.control import authenticated_listener as module
from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import (
    MAX_IDENTITY_BYTES,
    AuthenticatedListener,
    connect_authenticated,
)
from torchmn.control.connection import Channel
from torchmn.control.messages import LogWarning, Message, Terminate, encode
from torchmn.errors import LaunchError, UsageError

SECRET = "of this job"
WHO = LogWarning(text="rank 0")
Clients = list[tuple[Channel, Message]]


class Server:
    """Serves a listener in a thread, as a supervisor would, and keeps the authenticated clients."""

    def __init__(self, authenticated: AuthenticatedListener, address: tuple[str, int]) -> None:
        self.authenticated = authenticated
        self.address = address
        self.clients: Clients = []
        self._is_done = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def name(self) -> str:
        return "{}:{}".format(*self.address)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=limit(20))

    def close(self) -> None:
        self._is_done = True
        self._thread.join()
        for channel, _ in self.clients:
            channel.close()
        self.authenticated.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.authenticated, selectors.EVENT_READ)
            while not self._is_done:
                selector.select(0.05)
                self.clients += self.authenticated.admit()


Open = Callable[..., Server]


@pytest.fixture
def start_server() -> Iterator[Open]:
    with ExitStack() as stack:

        def make(handshake_s: float = 20.0) -> Server:
            listener = channels.listen_on()
            authenticated = authenticated_by(listener, handshake_s=handshake_s)
            server = Server(authenticated, listener.getsockname())
            stack.callback(server.close)
            return server

        yield make


def read_all(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection, closed or reset."""
    received = b""
    try:
        while chunk := connection.recv(1 << 16):
            received += chunk
    except ConnectionResetError:
        pass
    return received


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + limit(20)
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def can_be_read(authenticated: AuthenticatedListener) -> bool:
    return bool(select.select([authenticated], [], [], 0)[0])


def authenticated_by(listener: socket.socket, **options: Any) -> AuthenticatedListener:
    return AuthenticatedListener(listener, secret=SECRET, role="tests", **options)


def join(address: str, limit_s: float = 30.0, secret: str = SECRET, role: str = "tests") -> Channel:
    return connect_authenticated(address, secret=secret, role=role, identity=WHO, limit_s=limit_s)


@contextmanager
def aside(function: Callable[..., object], *args: object) -> Iterator[None]:
    """Meanwhile it runs in a thread of its own, whose end is waited for."""
    thread = threading.Thread(target=function, args=args)
    thread.start()
    yield
    thread.join()


def say_once(listener: socket.socket, words: bytes) -> None:
    """To the first client, and wait until it disconnects."""
    connection = listener.accept()[0]
    with connection:
        connection.sendall(words)
        read_all(connection)


def test_a_client_with_the_secret_is_accepted_and_can_send(start_server: Open) -> None:
    server = start_server()
    with closing(join(server.name)) as own:
        until(lambda: bool(server.clients))
        ((channel, who),) = server.clients
        assert who == WHO
        channel.post(Terminate(signum=3))
        assert own.wait_for(Terminate, limit(10)).signum == 3
        own.post(Terminate(signum=4))
        assert channel.wait_for(Terminate, limit(10)).signum == 4
    assert len(server.authenticated._pending) == 0


def test_a_message_sent_right_after_the_handshake_is_not_lost(start_server: Open) -> None:
    with channels.listen_on() as listener, closing(authenticated_by(listener)) as authenticated:

        def serve() -> None:
            while not (clients := authenticated.admit()):
                time.sleep(0.001)
            clients[0][0].post(Terminate(signum=9))
            clients[0][0].close()

        with aside(serve), closing(join(channels.address_of(listener))) as own:
            assert own.wait_for(Terminate, limit(10)).signum == 9


@pytest.mark.parametrize(("secret", "role"), [("another", "tests"), (SECRET, "another")])
def test_a_wrong_secret_or_role_is_rejected(start_server: Open, secret: str, role: str) -> None:
    server = start_server()
    with pytest.raises(LaunchError, match="TORCHMN_SECRET is the same here") as caught:
        join(server.name, limit(0.3), secret, role)
    assert secret not in str(caught.value)
    assert server.clients == []


@pytest.mark.parametrize(
    "sent",
    [
        b"\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(1000).replace(b"\n", b"x") + b"\n",
        b"\xff" * (MAX_IDENTITY_BYTES + 1),
        b"0" * 32 + b" " + b"0" * 64 + b' ["End", {"signum": 9}]\n',
        b"0" * 32 + b" " + b"0" * 64 + b" " + b"[" * 3000 + b"\n",
        b" \n \n",
    ],
    ids=["empty", "http", "random", "endless", "unsigned", "nested", "spaces"],
)
def test_unauthenticated_clients_receive_the_greeting_only(start_server: Open, sent: bytes) -> None:
    server = start_server()
    with server.connect() as client:
        client.sendall(sent)
        assert len(read_all(client)) <= len(b"torchmn listener 1 \n") + 32
    assert server.clients == []
    join(server.name).close()


def test_a_signed_identity_that_is_no_message_is_rejected(start_server: Open) -> None:
    """A client that knows the secret may still be a broken program."""
    server = start_server()
    client = module.connect(server.name, secret=SECRET, role="tests", line=b"[" * 3000 + b"\n")
    with client:
        assert read_all(client) == b""
    assert server.clients == []


def signed(greeting: bytes, identity: Message = WHO) -> bytes:
    """A client's line, of which the proof is for `WHO`."""
    nonce = greeting.split()[-1]
    proof = module._proof(SECRET, b"client", "tests", nonce, b"0" * 32, encode(WHO))
    return b" ".join((b"0" * 32, proof, encode(identity)))


def test_a_recording_cannot_be_replayed(start_server: Open) -> None:
    server = start_server()
    with server.connect() as client:
        greeting = client.recv(100)
        own = signed(greeting)
        client.sendall(own)
        theirs = greeting + client.recv(100)
    until(lambda: len(server.clients) == 1)
    with server.connect() as client:
        client.sendall(own)
        assert theirs not in read_all(client)
    assert len(server.clients) == 1

    with (
        socket.create_server(("127.0.0.1", 0)) as fake,  # and as the authenticated, to a client
        aside(say_once, fake, theirs),
        pytest.raises(LaunchError, match="does not know the secret"),
    ):
        join(channels.address_of(fake))


def test_a_client_rejects_its_own_proof_as_an_answer(start_server: Open) -> None:
    """An attacker forwards the listener's nonce, and returns the client's answer to the client."""
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def reflect() -> None:
            connection = fake.accept()[0]
            with connection:
                connection.sendall(b"torchmn listener 1 " + b"a" * 32 + b"\n")
                received = connection.recv(MAX_IDENTITY_BYTES)
                connection.sendall(received.split()[1] + b"\n")

        with aside(reflect), pytest.raises(LaunchError, match="does not know the secret"):
            join(channels.address_of(fake))


@pytest.mark.parametrize(
    ("identity", "after"),
    [(LogWarning(text="rank 1"), b""), (WHO, encode(Terminate(signum=9)))],
    ids=["another identity", "bytes after the proof"],
)
def test_what_the_proof_is_not_of_is_rejected(
    start_server: Open, identity: Message, after: bytes
) -> None:
    """Nothing sent before the listener's answer may count as a message."""
    server = start_server()
    with server.connect() as client:
        client.sendall(signed(client.recv(100), identity) + after)
        assert read_all(client) == b""
    assert server.clients == []


def test_silent_and_slow_clients_are_dropped(start_server: Open) -> None:
    server = start_server(handshake_s=0.3)
    with server.connect() as silent, server.connect() as slow:
        is_shut = threading.Event()

        def trickle() -> None:
            try:
                while not is_shut.wait(0.02):
                    slow.sendall(b"0")
            except OSError:
                is_shut.set()

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert read_all(silent).count(b"\n") == 1
            assert read_all(slow).count(b"\n") == 1
        finally:
            is_shut.set()
            thread.join()
    until(lambda: len(server.authenticated._pending) == 0)
    join(server.name).close()


def test_a_client_that_resets_its_connection_is_dropped(start_server: Open) -> None:
    server = start_server()
    with server.connect() as client:
        client.recv(100)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: len(server.authenticated._pending) == 0)
    join(server.name).close()


def test_a_late_listener_accepts_clients_that_answered_in_time() -> None:
    listener = channels.listen_on()
    with closing(authenticated_by(listener, handshake_s=0.01)) as authenticated:
        address, came = channels.address_of(listener), []
        with aside(lambda: came.append(join(address, limit_s=limit(20)))):
            until(lambda: authenticated.admit() == [] and len(authenticated._pending) == 1)
            until(lambda: can_be_read(authenticated))  # the client has answered
            time.sleep(0.02)  # and is late
            ((channel, _),) = authenticated.admit()
        channel.close()
        came[0].close()


def test_the_host_with_most_pending_connections_makes_room(start_server: Open) -> None:
    listener = channels.listen_on("0.0.0.0")  # reached from 127.0.0.2 and .3, as from two hosts
    port = listener.getsockname()[1]
    with closing(authenticated_by(listener, max_pending=3)) as authenticated, ExitStack() as s:

        def come(host: str) -> socket.socket:
            connection = socket.create_connection(
                ("127.0.0.1", port), timeout=limit(20), source_address=(host, 0)
            )
            s.enter_context(connection)
            num_before = len(authenticated._pending)
            until(
                lambda: (
                    authenticated.admit() == []
                    and len(authenticated._pending) >= min(num_before + 1, 3)
                )
            )
            return connection

        quiet, *loud = [come(f"127.0.0.{number}") for number in (2, 3, 3, 3, 3)]
        until(lambda: not authenticated.admit() and read_or_none(loud[0]) == b"")
        assert read_or_none(loud[1]) == b""
        assert read_or_none(quiet) is None
        assert read_or_none(loud[-1]) is None


def read_or_none(connection: socket.socket) -> bytes | None:
    """What follows the greeting; empty at the end of the connection, ``None`` if nothing does."""
    connection.settimeout(0.05)
    try:
        while received := connection.recv(100):
            assert received.startswith(b"torchmn listener")
    except ConnectionResetError:
        return b""
    except TimeoutError:
        return None
    return received


def test_a_listener_survives_without_free_descriptors() -> None:
    listener = channels.listen_on()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(authenticated_by(listener)) as authenticated:
        address = channels.address_of(listener)
        client = socket.create_connection(listener.getsockname())
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many"):
                os.dup(0)
            for _ in range(3):
                assert authenticated.admit() == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not can_be_read(authenticated)  # it does not spin in want of room
        clients: Clients = []
        came: list[Channel] = []
        with aside(lambda: came.append(join(address))):
            until(lambda: bool(clients.extend(authenticated.admit()) or clients))
        for channel in (clients[0][0], came[0]):
            channel.close()
        client.close()


def test_a_listener_needs_a_secret() -> None:
    with channels.listen_on() as listener, pytest.raises(UsageError, match="needs a secret"):
        AuthenticatedListener(listener, secret="", role="tests")


def test_close_drops_pending_connections(start_server: Open) -> None:
    listener = channels.listen_on()
    authenticated = authenticated_by(listener)
    with socket.create_connection(listener.getsockname(), timeout=limit(20)) as client:
        until(lambda: authenticated.admit() == [] and len(authenticated._pending) == 1)
        authenticated.close()
        assert read_all(client).count(b"\n") <= 1


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:x", "127.0.0.1:1", "::1:99999"])
def test_an_address_without_a_listener(address: str) -> None:
    with pytest.raises(LaunchError, match="does not answer"):
        join(address, limit_s=2)


def test_a_client_gives_up_on_another_kind_of_listener(start_server: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = channels.address_of(other)
        with pytest.raises(LaunchError, match="does not answer: timed out"):
            join(address, limit_s=0.1)
        other.accept()[0].close()
        with (
            aside(say_once, other, b"?" * 99),
            pytest.raises(LaunchError, match="is not the tests of a torchmn job"),
        ):
            join(address, limit_s=limit(5))


def test_a_long_identity_is_an_error() -> None:
    with pytest.raises(LaunchError, match="must be shorter than 4096"):
        connect_authenticated(
            "127.0.0.1:1",
            secret=SECRET,
            role="t",
            identity=LogWarning(text="x" * MAX_IDENTITY_BYTES),
        )
